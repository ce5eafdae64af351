"""Claims protect KV that an ingest is storing for chunks that are not in the catalogue yet.

An ingest claims all keys of a document before it looks up the first of them in the store. The transaction that puts
the document into the catalogue also releases the claim. A process that removes unreferenced KV does so inside a write
transaction, after `unclaimed` has listed the keys that no chunk refers to and no claim names. So an ingest never
relies on an entry that another process is removing. This holds for every store, whatever the age of the entry.

An ingest renews its claim while it works. A claim that was not renewed for `grace` seconds belongs to a dead process.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable

from ragkv.types import Key

GRACE_SECONDS = 3600.0
"""Longer than any model needs for one chunk, and than a machine is likely to be suspended during an ingest."""


def claim(connection: sqlite3.Connection, keys: Iterable[Key], fingerprint: str) -> int:
    """Claim keys and return the id of the claim. fingerprint: of the model that produces their KV; it is recorded."""
    sql = "INSERT INTO facts VALUES ('fingerprint', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    connection.execute(sql, (fingerprint,))
    row = connection.execute("INSERT INTO claims (renewed) VALUES (?)", (time.time(),)).lastrowid
    connection.executemany("INSERT INTO claimed VALUES (?, ?)", [(key, row) for key in sorted(set(keys))])
    assert row is not None  # sqlite3 types lastrowid as optional because of statements that insert nothing
    return row


def renew(connection: sqlite3.Connection, claim_id: int) -> None:
    """Record that the claim's ingest is still running."""
    connection.execute("UPDATE claims SET renewed = ? WHERE row = ?", (time.time(), claim_id))


def release(connection: sqlite3.Connection, claim_id: int) -> None:
    """Delete a claim that is no longer needed."""
    connection.execute("DELETE FROM claims WHERE row = ?", (claim_id,))


def drop_expired(connection: sqlite3.Connection, grace: float) -> None:
    """Delete the claims of dead processes: those that were not renewed for `grace` seconds."""
    connection.execute("DELETE FROM claims WHERE renewed <= ?", (time.time() - grace,))


def unclaimed(connection: sqlite3.Connection, keys: Iterable[Key], grace: float, mine: int | None) -> list[Key]:
    """Return those of `keys` that no chunk refers to and no live claim names. The claim `mine` does not count."""
    sql = (
        "SELECT DISTINCT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE key = value) AND NOT"
        " EXISTS (SELECT 1 FROM claimed JOIN claims ON claims.row = claim WHERE key = value AND renewed > ? AND"
        " claim IS NOT ?)"
    )
    return [Key(key) for (key,) in connection.execute(sql, (json.dumps(list(keys)), time.time() - grace, mine))]


def fingerprint(connection: sqlite3.Connection) -> str | None:
    """Return the fingerprint recorded with the latest claim, or None before the first claim."""
    row = connection.execute("SELECT value FROM facts WHERE name = 'fingerprint'").fetchone()
    return str(row[0]) if row else None
