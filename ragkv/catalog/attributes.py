"""Attributes: an index of the documents' metadata, and the filters that use it.

    {"kind": "report", "year": [2023, 2024]}      every key must match, each by one of its values

A value matches if the attribute equals it, or if the attribute is a list that contains it. Types must agree: 1 equals
1.0, but not "1" or true. A missing attribute matches nothing, not even null.

With SQLite the index is the table `attributes`, which triggers write (derived.py). With PostgreSQL it is the table
`document_attributes` with the metadata as JSONB. Functions that take a transaction run inside that of the caller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Select, bindparam, cast, or_, select, text
from sqlalchemy.dialects.postgresql import JSONB

from ragkv.catalog.derived import TYPE, VALUE
from ragkv.catalog.limits import WHOLE_NUMBERS
from ragkv.catalog.statements import upsert, values
from ragkv.catalog.tables import chunks, document_attributes, documents
from ragkv.catalog.transaction import DialectName, Transaction
from ragkv.errors import InputError
from ragkv.normalisation import folded
from ragkv.types import Document, Filter

MAX_KEYS, MAX_VALUES = 16, 64

_MATCHING = f"""SELECT document FROM json_each(:values{{n}}) AS one CROSS JOIN attributes AS own WHERE
    collection = :collection AND own.key = :key{{n}} AND own.type = {TYPE.format(it="one")}
    AND own.value = {VALUE.format(it="one")}"""
_RECORD = upsert(document_attributes, ["document"])


@dataclass(frozen=True)
class FilterShape:
    """The form of a condition, without its values. Statements are built once for each.

    Attributes:
        dialect: The database.
        counts: The number of values of each key of the filter.
        named: Whether documents are named.
    """

    dialect: DialectName
    counts: tuple[int, ...]
    named: bool

    def conditions(self, row: ColumnElement[int]) -> list[ColumnElement[bool]]:
        """Return the conditions on the column that holds the row of a document."""
        found: list[ColumnElement[bool]] = []
        for number, count in enumerate(self.counts):
            if self.dialect == "sqlite":
                found.append(row.in_(text(_MATCHING.format(n=number))))
            else:
                found.append(row.in_(_containing(number, count)))
        if self.named:
            wanted = select(values("documents", "text").c.value)
            named = documents.alias("named")
            mine = named.c.collection == bindparam("collection")
            found.append(row.in_(select(named.c.row).where(mine, named.c.id.in_(wanted))))
        return found


def _containing(number: int, count: int) -> Select[Any]:
    """Select the documents whose attribute equals, or contains, one of the values of the filter's key."""
    metadata = document_attributes.c.metadata
    names = [f"{how}{number}_{value}" for value in range(count) for how in ("equal", "list")]
    contained = [metadata.contains(cast(bindparam(name), JSONB)) for name in names]
    return select(document_attributes.c.document).where(or_(*contained))


def condition(
    transaction: Transaction, collection: str, filter: Filter | None, documents: Sequence[str] | None = None
) -> tuple[FilterShape, dict[str, Any]]:
    """Translate a filter.

    Args:
        transaction: The transaction.
        collection: Collection of the documents.
        filter: What the metadata must contain; None for all documents.
        documents: Ids of the documents that may be selected; None for all.

    Returns:
        The shape of the condition, and its parameters, `collection` included.

    Raises:
        InputError: The filter is malformed.
    """
    wanted, parameters = _checked(filter or {}), dict[str, Any](collection=collection)
    for number, (key, allowed) in enumerate(wanted):
        if transaction.dialect == "sqlite":
            parameters[f"key{number}"] = key
            parameters[f"values{number}"] = json.dumps(allowed, ensure_ascii=False)
        else:
            for at, value in enumerate(allowed):
                parameters[f"equal{number}_{at}"] = _as_json({key: value})
                parameters[f"list{number}_{at}"] = _as_json({key: [value]})
    if documents is not None:
        parameters["documents"] = transaction.array(documents)
    counts = tuple(1 if transaction.dialect == "sqlite" else len(allowed) for _, allowed in wanted)
    return FilterShape(transaction.dialect, counts, documents is not None), parameters


def rows(
    transaction: Transaction, collection: str, filter: Filter | None, documents: Sequence[str] | None = None
) -> NDArray[np.int64]:
    """Return the rows, ascending, of the chunks whose documents match. For the arguments see `condition`."""
    shape, parameters = condition(transaction, collection, filter, documents)
    found = transaction.execute(_select_rows(shape), parameters)
    return np.sort(np.fromiter((row for (row,) in found), np.int64))


@lru_cache(maxsize=256)
def _select_rows(shape: FilterShape) -> Select[Any]:
    mine: Any = chunks.c.collection == bindparam("collection")
    if shape.dialect == "sqlite":
        # The plus keeps SQLite from scanning all chunks of the collection to find those of a few documents.
        mine = text("+chunks.collection = :collection")
    return select(chunks.c.row).where(mine, *shape.conditions(chunks.c.document))


def record(transaction: Transaction, row: int, document: Document) -> None:
    """Record the attributes of a document that was just written. row: of the document."""
    if transaction.dialect == "postgresql":
        named = folded(f"{document.id}\n{document.title}").casefold()
        transaction.execute(_RECORD, {"document": row, "metadata": _as_json(dict(document.metadata)), "folded": named})


def _as_json(value: Any) -> str:
    """Return JSON for PostgreSQL, whose JSONB has no NUL. It becomes another character that no text has."""
    return json.dumps(value, ensure_ascii=False).replace("\\u0000", "\\ufdd0")


def _checked(filter: Filter) -> list[tuple[str, list[Any]]]:
    """Return [(key, its values)]. Raises InputError."""
    if len(filter) > MAX_KEYS:
        raise InputError(f"a filter may have {MAX_KEYS} keys, this one has {len(filter)}")
    checked = []
    for key, value in filter.items():
        allowed = list(value) if isinstance(value, list | tuple) else [value]
        if not all(map(_is_scalar, allowed)):
            raise InputError(f"filter {key!r}: a value is a string, a number, true, false or null, or a list of these")
        if any(isinstance(each, int) and each not in WHOLE_NUMBERS for each in allowed):
            raise InputError(
                f"filter {key!r}: a whole number may have 64 bits; larger ones are sent and stored as text"
            )
        if not 1 <= len(allowed) <= MAX_VALUES:
            raise InputError(f"filter {key!r}: 1 to {MAX_VALUES} values may be named, not {len(allowed)}")
        checked.append((key, allowed))
    return checked


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
