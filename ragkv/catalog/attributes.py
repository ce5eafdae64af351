"""Attributes: an index of the documents' metadata, and the filters that use it.

    {"kind": "report", "year": [2023, 2024]}      every key must match, each by one of its values

A value matches if the attribute equals it, or if the attribute is a list that contains it. Types must agree: 1 equals
1.0, but not "1" or true. A missing attribute matches nothing, not even null.

The table `attributes` is derived from the column `metadata` and kept up to date by triggers, so a filter does not scan
all documents. It can be rebuilt. Functions that take a connection run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import InputError
from ragkv.types import Filter

MAX_KEYS, MAX_VALUES = 16, 64

# type: the type name of json_each; 'real' for every number, because 1 and 1.0 are equal. value: '' for null.
_TABLE = (
    "CREATE TABLE attributes (collection TEXT, key TEXT, type TEXT, value, document INTEGER,"
    " PRIMARY KEY (collection, key, type, value, document)) WITHOUT ROWID",
    "CREATE INDEX attributes_by_document ON attributes (document)",
)
_TYPE, _VALUE = "replace({it}.type, 'integer', 'real')", "ifnull({it}.atom, '')"
_WRITE = f"""
INSERT OR IGNORE INTO attributes
SELECT {{of}}.collection, one.key, {_TYPE.format(it="one")}, {_VALUE.format(it="one")}, {{of}}.row
FROM {{documents}} json_each({{of}}.metadata) AS one WHERE one.type NOT IN ('array', 'object')
UNION ALL
SELECT {{of}}.collection, list.key, {_TYPE.format(it="one")}, {_VALUE.format(it="one")}, {{of}}.row
FROM {{documents}} json_each({{of}}.metadata) AS list,
    json_each(CASE list.type WHEN 'array' THEN list.value ELSE '[]' END) AS one
WHERE one.type NOT IN ('array', 'object');
"""
_WRITE_NEW = _WRITE.format(of="new", documents="")
_TRIGGERS = (
    f"CREATE TRIGGER attributes_insert AFTER INSERT ON documents BEGIN {_WRITE_NEW} END",
    "CREATE TRIGGER attributes_update AFTER UPDATE OF metadata ON documents BEGIN"
    f" DELETE FROM attributes WHERE document = old.row; {_WRITE_NEW} END",
    "CREATE TRIGGER attributes_delete AFTER DELETE ON documents BEGIN"
    " DELETE FROM attributes WHERE document = old.row; END",
)
_MATCHING = f"""(SELECT document FROM json_each(?) AS one CROSS JOIN attributes AS own WHERE collection = ? AND
    own.key = ? AND own.type = {_TYPE.format(it="one")} AND own.value = {_VALUE.format(it="one")})"""

_NAMED = "(SELECT row FROM documents AS named WHERE named.collection = ? AND id IN (SELECT value FROM json_each(?)))"


def condition(
    collection: str, filter: Filter | None, row: str, documents: Sequence[str] | None = None
) -> tuple[str, list[str]]:
    """Translate a filter to SQL.

    Args:
        collection: Collection of the documents.
        filter: What the metadata must contain; None for all documents.
        row: Name of the column that holds the row of a document.
        documents: Ids of the documents that may be selected; None for all.

    Returns:
        An SQL condition on the column `row`, and its parameters.

    Raises:
        InputError: The filter is malformed.
    """
    conditions, parameters = ["TRUE"], list[str]()
    for key, values in _encode_values(filter or {}):
        conditions.append(f"{row} IN {_MATCHING}")
        parameters += [values, collection, key]
    if documents is not None:
        conditions.append(f"{row} IN {_NAMED}")
        parameters += [collection, json.dumps(list(documents))]
    return " AND ".join(conditions), parameters


def rows(
    connection: sqlite3.Connection, collection: str, filter: Filter | None, documents: Sequence[str] | None = None
) -> NDArray[np.int64]:
    """Return the rows, ascending, of the chunks whose documents match. For the arguments see `condition`."""
    matching, parameters = condition(collection, filter, "document", documents)
    # The plus keeps SQLite from scanning all chunks of the collection to find those of a few documents.
    sql = f"SELECT row FROM chunks WHERE +collection = ? AND {matching}"
    found = connection.execute(sql, (collection, *parameters))
    return np.sort(np.fromiter((row for (row,) in found), np.int64))


def is_intact(connection: sqlite3.Connection) -> bool:
    """Return whether the table and its triggers exist."""
    sql = "SELECT count(*) FROM sqlite_master WHERE name = 'attributes' OR name GLOB 'attributes_*'"
    return bool(connection.execute(sql).fetchone()[0] == len(_TABLE) + len(_TRIGGERS))


def rebuild(connection: sqlite3.Connection) -> None:
    """Rebuild the table from the documents. Needs a write transaction."""
    for event in ("insert", "update", "delete"):
        connection.execute(f"DROP TRIGGER IF EXISTS attributes_{event}")
    connection.execute("DROP TABLE IF EXISTS attributes")
    for statement in (*_TABLE, *_TRIGGERS):
        connection.execute(statement)
    connection.execute(_WRITE.format(of="documents", documents="documents,"))


def _encode_values(filter: Filter) -> list[tuple[str, str]]:
    """Return [(key, its values as a JSON array)]. Raises InputError."""
    if len(filter) > MAX_KEYS:
        raise InputError(f"a filter may have {MAX_KEYS} keys, this one has {len(filter)}")
    encoded = []
    for key, value in filter.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not all(map(_is_scalar, values)):
            raise InputError(f"filter {key!r}: a value is a string, a number, true, false or null, or a list of these")
        if not 1 <= len(values) <= MAX_VALUES:
            raise InputError(f"filter {key!r}: 1 to {MAX_VALUES} values may be named, not {len(values)}")
        encoded.append((key, json.dumps(values, ensure_ascii=False)))
    return encoded


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
