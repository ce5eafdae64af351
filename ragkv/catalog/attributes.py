"""Attributes: what the metadata of documents says, and filters over it.

    {"kind": "report", "year": [2023, 2024]}      all keys have to hold, each by one of its values

A value holds where the attribute equals it, or is a list one of whose elements does. Types count: 1 equals 1.0, and
neither "1" nor true. An attribute that is missing equals nothing, null included.

The table is a view of the column `metadata`, kept by triggers, so that a filter costs what it finds and not a walk over
all documents. It can be made anew. Functions with a connection run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import math
import sqlite3

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import InputError
from ragkv.types import Filter

MAX_KEYS, MAX_VALUES = 16, 64

# type: as json_each names it, 'real' for every number, for 1 and 1.0 are equal · value: '' for null
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
_HOLDS = f"""(SELECT document FROM json_each(?) AS one CROSS JOIN attributes AS own WHERE collection = ? AND
    own.key = ? AND own.type = {_TYPE.format(it="one")} AND own.value = {_VALUE.format(it="one")})"""


def condition(collection: str, wanted: Filter | None, row: str) -> tuple[str, list[str]]:
    """(SQL condition on the column `row`, a document's row, of this collection; its parameters).

    Raises InputError for what is no filter.
    """
    conditions, parameters = ["TRUE"], list[str]()
    for key, values in _lists(wanted or {}):
        conditions.append(f"{row} IN {_HOLDS}")
        parameters += [values, collection, key]
    return " AND ".join(conditions), parameters


def rows(connection: sqlite3.Connection, collection: str, wanted: Filter) -> NDArray[np.int64]:
    """Rows of the chunks, ascending, whose documents `wanted` describes."""
    holds, parameters = condition(collection, wanted, "document")
    # The plus keeps SQLite from walking all chunks of the collection for the few of the documents.
    sql = f"SELECT row FROM chunks WHERE +collection = ? AND {holds}"
    found = connection.execute(sql, (collection, *parameters))
    return np.sort(np.fromiter((row for (row,) in found), np.int64))


def whole(connection: sqlite3.Connection) -> bool:
    """Whether the table and its triggers are there."""
    sql = "SELECT count(*) FROM sqlite_master WHERE name = 'attributes' OR name GLOB 'attributes_*'"
    return bool(connection.execute(sql).fetchone()[0] == len(_TABLE) + len(_TRIGGERS))


def rebuild(connection: sqlite3.Connection) -> None:
    """Make the table anew from the documents. Needs a write transaction."""
    for event in ("insert", "update", "delete"):
        connection.execute(f"DROP TRIGGER IF EXISTS attributes_{event}")
    connection.execute("DROP TABLE IF EXISTS attributes")
    for statement in (*_TABLE, *_TRIGGERS):
        connection.execute(statement)
    connection.execute(_WRITE.format(of="documents", documents="documents,"))


def _lists(wanted: Filter) -> list[tuple[str, str]]:
    """[(key, its values as a JSON array)]"""
    if len(wanted) > MAX_KEYS:
        raise InputError(f"a filter may have {MAX_KEYS} keys, this one has {len(wanted)}")
    lists = []
    for key, given in wanted.items():
        values = list(given) if isinstance(given, list | tuple) else [given]
        if not all(map(_is_scalar, values)):
            raise InputError(f"filter {key!r}: a value is a string, a number, true, false or null, or a list of these")
        if not 1 <= len(values) <= MAX_VALUES:
            raise InputError(f"filter {key!r}: 1 to {MAX_VALUES} values may be named, not {len(values)}")
        lists.append((key, json.dumps(values, ensure_ascii=False)))
    return lists


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
