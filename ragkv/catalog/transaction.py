"""Transaction: runs statements of SQLAlchemy Core on the connection of the driver.

A statement is compiled once for each database and kept, so that a call costs little more than one of the driver: a
question makes a dozen of them, and each takes some microseconds. Statements are therefore built once, at import or by a
cached function, with `bindparam` for what changes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

from sqlalchemy import Dialect, Executable

from ragkv.catalog.statements import Upsert

CHANNEL = "ragkv_changes"
"""The channel of PostgreSQL that tells of changed collections."""

DialectName = Literal["sqlite", "postgresql"]
Parameters = Mapping[str, Any]


class Rows(Protocol):
    """What a statement found: a cursor of the driver."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Transaction:
    """One transaction. It belongs to one thread and ends with the block that opened it.

    Attributes:
        driver: The connection of sqlite3 or psycopg.
        dialect: The database: `sqlite` or `postgresql`.
    """

    def __init__(self, driver: Any, dialect: Dialect):
        """Take a connection with an open transaction."""
        self.driver, self._dialect = driver, dialect
        self.dialect: DialectName = "sqlite" if dialect.name == "sqlite" else "postgresql"

    def execute(self, statement: Executable | Upsert, parameters: Parameters = {}) -> Rows:  # noqa: B006 (never changed)
        """Run a statement."""
        sql, arguments = _compiled(statement, self._dialect, tuple(parameters))
        rows: Rows = self.driver.execute(sql, arguments(parameters))
        return rows

    def execute_all(self, statement: Executable | Upsert, rows: Iterable[Parameters]) -> None:
        """Run a statement once for each row of parameters."""
        listed = list(rows)
        if listed:
            sql, arguments = _compiled(statement, self._dialect, tuple(listed[0]))
            self.driver.cursor().executemany(sql, [arguments(row) for row in listed])

    def insert_all(self, statement: Executable, rows: Sequence[Parameters]) -> list[int]:
        """Run an INSERT … RETURNING of one number for each row of parameters, and return the numbers."""
        if not rows:
            return []
        sql, arguments = _compiled(statement, self._dialect, tuple(rows[0]))
        if self.dialect == "sqlite":
            return [self.driver.execute(sql, arguments(row)).fetchone()[0] for row in rows]
        cursor = self.driver.cursor()
        cursor.executemany(sql, [arguments(row) for row in rows], returning=True)
        found = list[int]()
        while cursor.pgresult is not None:
            found += [row[0] for row in cursor.fetchall()]
            if not cursor.nextset():
                break
        return found

    def scalar(self, statement: Executable, parameters: Parameters = {}) -> Any:  # noqa: B006 (never changed)
        """Run a statement and return the first column of its first row; None if there is no row."""
        row = self.execute(statement, parameters).fetchone()
        return None if row is None else row[0]

    def exec_driver_sql(self, sql: str, parameters: Sequence[Any] | None = None) -> Rows:
        """Run SQL of this one database."""
        rows: Rows = self.driver.execute(sql, parameters) if parameters else self.driver.execute(sql)
        return rows

    def array(self, elements: Iterable[Any]) -> Any:
        """Return elements as the parameter that `statements.values` takes."""
        listed = list(elements)
        return json.dumps(listed) if self.dialect == "sqlite" else listed

    def lock(self, *names: str) -> None:
        """Wait until no other transaction of any process holds one of these locks, and hold them until the end.

        With SQLite a write transaction is alone anyway.
        """
        if self.dialect == "postgresql":
            for name in sorted(names):
                self.driver.execute("SELECT pg_advisory_xact_lock(%s)", (lock_number(name),))

    def notify(self) -> None:
        """Wake the listeners of all processes when this transaction is committed. With SQLite they look themselves."""
        if self.dialect == "postgresql":
            self.driver.execute(f"NOTIFY {CHANNEL}")

    def now(self) -> float:
        """Return the time in Unix seconds, by one clock for all processes that use the catalogue."""
        if self.dialect == "sqlite":
            return time.time()
        found: float = self.driver.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()[0]
        return found


def lock_number(name: str) -> int:
    """Return the number that PostgreSQL knows a lock by."""
    return int.from_bytes(hashlib.sha256(f"ragkv {name}".encode()).digest()[:8], "big", signed=True)


class _Arguments:
    """Puts parameters into the form that the driver takes: by position for SQLite, by name for PostgreSQL."""

    def __init__(self, fixed: Mapping[str, Any], positions: Sequence[str] | None):
        self._fixed, self._positions = fixed, positions

    def __call__(self, parameters: Parameters) -> Any:
        given = {**self._fixed, **parameters} if self._fixed else parameters
        return given if self._positions is None else [given[name] for name in self._positions]


@lru_cache(maxsize=2048)
def _compiled(statement: Executable | Upsert, dialect: Dialect, names: tuple[str, ...]) -> tuple[str, _Arguments]:
    """Compile a statement for parameters of these names. Those that are columns of its table are written to them."""
    if isinstance(statement, Upsert):
        statement = statement.by_dialect[dialect.name]
    compiled = statement.compile(dialect=dialect, column_keys=list(names))  # type: ignore[attr-defined]
    fixed = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}
    positions = None if compiled.positiontup is None else tuple(compiled.positiontup)
    return str(compiled), _Arguments(fixed, positions)
