"""Versions: what is known of the present version of each document beside the table `documents`.

The table `versions` is derived from the table `documents` and kept up to date by triggers, so it is right whichever
release writes. Only the pages are written by the ingest itself.

Every function runs inside a write transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

# number: counts the contents that the document has had · bytes: of the text in UTF-8 · pages: see `Document.pages`
_TABLE = (
    "CREATE TABLE versions (document INTEGER PRIMARY KEY REFERENCES documents (row) ON DELETE CASCADE,"
    " number INTEGER NOT NULL, bytes INTEGER NOT NULL, pages TEXT NOT NULL)"
)
_TRIGGERS = (
    "CREATE TRIGGER versions_insert AFTER INSERT ON documents BEGIN"
    " INSERT INTO versions VALUES (new.row, 1, length(CAST(new.text AS BLOB)), '[]'); END",
    "CREATE TRIGGER versions_update AFTER UPDATE OF content_hash, text ON documents BEGIN"
    " UPDATE versions SET number = number + (new.content_hash != old.content_hash),"
    " bytes = length(CAST(new.text AS BLOB)), pages = '[]' WHERE document = new.row; END",
)


def set_pages(connection: sqlite3.Connection, document: int, pages: Sequence[tuple[int, int]]) -> None:
    """Record where the pages of a document begin. document: its row."""
    connection.execute("UPDATE versions SET pages = ? WHERE document = ?", (json.dumps(list(pages)), document))


def is_intact(connection: sqlite3.Connection) -> bool:
    """Return whether the table and its triggers exist."""
    sql = "SELECT count(*) FROM sqlite_master WHERE name = 'versions' OR name GLOB 'versions_*'"
    return bool(connection.execute(sql).fetchone()[0] == 1 + len(_TRIGGERS))


def rebuild(connection: sqlite3.Connection) -> None:
    """Create what is missing. Documents of a release without this table become version 1; others keep their number."""
    for event in ("insert", "update"):
        connection.execute(f"DROP TRIGGER IF EXISTS versions_{event}")
    connection.execute(_TABLE.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
    for trigger in _TRIGGERS:
        connection.execute(trigger)
    connection.execute("INSERT OR IGNORE INTO versions SELECT row, 1, length(CAST(text AS BLOB)), '[]' FROM documents")
