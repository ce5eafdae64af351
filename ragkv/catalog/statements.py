"""What SQLite and PostgreSQL say differently, as elements of SQLAlchemy Core.

    values("rows", "bigint")     a table with one column `value`: the elements of an array parameter (Transaction.array)
    larger(one, other)           the larger of two numbers
    upsert(table, keys, update)  INSERT … ON CONFLICT

and `one_of(column, words)`: the column is one of these words, which are written into the statement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, Insert, Integer, Table, TableValuedAlias, Text, bindparam, column, literal_column
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

ROW = BigInteger().with_variant(Integer(), "sqlite")  # only INTEGER is an alias of SQLite's row id
NAME = Text().with_variant(Text(collation="C"), "postgresql")  # ordered by code points, as in SQLite
REAL: TypeEngine[float] = sqlite.REAL().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")

Update = Callable[[Any], Mapping[str, Any]]
"""Takes the row that was not inserted (its columns are attributes) and returns what the present row is set to."""


class _Elements(FunctionElement[Any]):
    """The elements of an array parameter, as a function that returns a table."""

    inherit_cache = True

    def __init__(self, name: str, kind: str):
        super().__init__(bindparam(name))
        self.kind = kind


@compiles(_Elements, "sqlite")
def _elements_of_json(element: _Elements, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **options)})"


@compiles(_Elements, "postgresql")
def _elements_of_array(element: _Elements, compiler: SQLCompiler, **options: Any) -> str:
    return f"unnest(CAST({compiler.process(element.clauses, **options)} AS {element.kind}[]))"


def values(name: str, kind: Literal["bigint", "text"]) -> TableValuedAlias:
    """Return the elements of the array parameter `name` as a table with the column `value`."""
    # PostgreSQL names the one column of such a table like the table.
    return _Elements(name, kind).table_valued(column("value"), name="value")


def one_of(value: ColumnElement[str], words: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a value is one of a few fixed words of letters."""
    return value.in_([literal_column(f"'{word}'") for word in words])


class larger(FunctionElement[Any]):
    """The larger of two numbers."""

    inherit_cache = True


@compiles(larger, "sqlite")
def _larger_in_sqlite(element: larger, compiler: SQLCompiler, **options: Any) -> str:
    return f"max({compiler.process(element.clauses, **options)})"


@compiles(larger, "postgresql")
def _larger_in_postgresql(element: larger, compiler: SQLCompiler, **options: Any) -> str:
    return f"greatest({compiler.process(element.clauses, **options)})"


@dataclass(frozen=True, eq=False)
class Upsert:
    """An INSERT … ON CONFLICT in the dialect of each database."""

    by_dialect: Mapping[str, Insert]


def upsert(table: Table, keys: Sequence[str], update: Update | None = None) -> Upsert:
    """Return a statement that inserts a row, or changes the row that is there.

    Args:
        table: The table.
        keys: Columns that are unique together.
        update: What an existing row is set to; None sets all columns that are not in `keys`.
    """
    others = [each.name for each in table.columns if each.name not in keys]

    def assigned(new: Any) -> dict[str, ColumnElement[Any]]:
        return dict(update(new)) if update else {name: new[name] for name in others}

    lite, post = sqlite.insert(table), postgresql.insert(table)
    return Upsert(
        {
            "sqlite": lite.on_conflict_do_update(index_elements=keys, set_=assigned(lite.excluded)),
            "postgresql": post.on_conflict_do_update(index_elements=keys, set_=assigned(post.excluded)),
        }
    )
