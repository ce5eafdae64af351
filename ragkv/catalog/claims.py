"""Claims: keys whose KV is being stored for chunks that are not in the catalogue yet.

An ingest claims all keys of a document before it looks for the first of them in the store, and its claim goes in the
transaction that puts the document into the catalogue. Whoever removes KV that nobody refers to does so inside a write
transaction in which `free` has told which keys nobody refers to and nobody claims. So there is no moment in which an
ingest relies on an entry that is just being removed, whatever the store is and however old the entry.

A claim is renewed while its ingest is at work. One that was not for `grace` seconds belongs to a process that died.

These functions run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable

from ragkv.types import Key

GRACE_SECONDS = 3600.0
"""Longer than any model takes for one chunk, and than a machine is likely to be suspended during an ingest."""


def claim(connection: sqlite3.Connection, keys: Iterable[Key], fingerprint: str) -> int:
    """Claim the keys; returns the claim's number. fingerprint: of the model that makes their KV, kept on record."""
    sql = "INSERT INTO facts VALUES ('fingerprint', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    connection.execute(sql, (fingerprint,))
    row = connection.execute("INSERT INTO claims (renewed) VALUES (?)", (time.time(),)).lastrowid
    connection.executemany("INSERT INTO claimed VALUES (?, ?)", [(key, row) for key in sorted(set(keys))])
    assert row is not None  # sqlite3 declares it so for statements that insert nothing
    return row


def renew(connection: sqlite3.Connection, number: int) -> None:
    """The claim's ingest is still at work."""
    connection.execute("UPDATE claims SET renewed = ? WHERE row = ?", (time.time(), number))


def release(connection: sqlite3.Connection, number: int) -> None:
    """The claim is no longer needed."""
    connection.execute("DELETE FROM claims WHERE row = ?", (number,))


def forget(connection: sqlite3.Connection, grace: float) -> None:
    """Drop claims of processes that died."""
    connection.execute("DELETE FROM claims WHERE renewed <= ?", (time.time() - grace,))


def free(connection: sqlite3.Connection, keys: Iterable[Key], grace: float, mine: int | None) -> list[Key]:
    """Those of `keys` that no chunk refers to and nobody claims but the claim `mine`."""
    sql = (
        "SELECT DISTINCT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE key = value) AND NOT"
        " EXISTS (SELECT 1 FROM claimed JOIN claims ON claims.row = claim WHERE key = value AND renewed > ? AND"
        " claim IS NOT ?)"
    )
    return [Key(key) for (key,) in connection.execute(sql, (json.dumps(list(keys)), time.time() - grace, mine))]


def fingerprint(connection: sqlite3.Connection) -> str | None:
    """Of the model that claimed last; None when none has."""
    row = connection.execute("SELECT value FROM facts WHERE name = 'fingerprint'").fetchone()
    return str(row[0]) if row else None
