"""Queries on vectors and on generations.

A collection's generation grows with every change. An index compares generations to find out whether it is stale.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import embedders
from ragkv.catalog.models import Changes, EmbedderIdentity
from ragkv.errors import CatalogCorrupt, InputError

# A document that came while the embedder changes has next vectors alone, until those of its collection are complete.
_SEARCHABLE = (
    "SELECT row FROM chunks WHERE collection = ? AND (NOT EXISTS (SELECT 1 FROM next_vectors WHERE chunk = row)"
    " OR EXISTS (SELECT 1 FROM vectors WHERE chunk = row)) ORDER BY row"
)


def raise_generation(connection: sqlite3.Connection, collection: str) -> None:
    """Raise the generation of a collection that changed."""
    # The clock makes sure that no generation is used twice after the file was restored from a backup.
    connection.execute(
        "INSERT INTO collections (name, generation) VALUES (?, ?) ON CONFLICT (name) DO UPDATE"
        " SET generation = max(generation + 1, excluded.generation)",
        (collection, time.time_ns()),
    )


def generations(connection: sqlite3.Connection, collection: str) -> tuple[int, int]:
    """Return (the generation now, the generation at which all vectors were last replaced).

    Both are 0 for an unknown collection.
    """
    sql = "SELECT generation, replaced FROM collections WHERE name = ?"
    generation, replaced = connection.execute(sql, (collection,)).fetchone() or (0, 0)
    return generation, replaced


def changes(connection: sqlite3.Connection, collection: str, known: NDArray[np.int64], since: int) -> Changes:
    """Return what changed since generation `since`; see `Catalog.changes`."""
    generation, replaced = generations(connection, collection)
    identity = embedders.of_collection(connection, collection)
    found = connection.execute(_SEARCHABLE, (collection,))
    rows = np.fromiter((row for (row,) in found), np.int64)
    kept = np.intersect1d(known, rows) if since >= replaced else known[:0]
    added = np.setdiff1d(rows, kept)
    vectors = _load(connection, added, identity.dimension if identity else 0)
    return Changes(generation, np.setdiff1d(known, kept), added, vectors, identity)


def of_rows(connection: sqlite3.Connection, rows: Iterable[int]) -> dict[int, NDArray[np.float32]]:
    """Return the vectors [dimension] of the chunks at these rows. Rows that no longer exist are left out."""
    sql = "SELECT chunk, vector FROM vectors WHERE chunk IN (SELECT value FROM json_each(?))"
    found = connection.execute(sql, (json.dumps([int(row) for row in rows]),))
    return {row: np.frombuffer(blob, np.float32) for row, blob in found}


def replace(
    connection: sqlite3.Connection, rows: Sequence[int], vectors: NDArray[np.float32], identity: EmbedderIdentity
) -> None:
    """Replace the vectors of all chunks; see `Catalog.replace_vectors`."""
    present = [row for (row,) in connection.execute("SELECT row FROM chunks ORDER BY row")]
    if present != list(rows):
        raise InputError("documents changed while they were embedded again; run `ragkv reindex` once more")
    connection.execute("DELETE FROM vectors")
    blobs = (vector.tobytes() for vector in np.ascontiguousarray(vectors, dtype=np.float32))
    connection.executemany("INSERT INTO vectors VALUES (?, ?)", zip(rows, blobs, strict=True))
    embedders.record(connection, identity)
    for (name,) in connection.execute("SELECT name FROM collections").fetchall():
        raise_generation(connection, name)
    connection.execute("UPDATE collections SET replaced = generation")


def swap(connection: sqlite3.Connection, collection: str, identity: EmbedderIdentity) -> bool:
    """Put next vectors in the place of the present ones; see `Catalog.swap_vectors`."""
    if not embedders.swap(connection, collection, identity):
        return False
    raise_generation(connection, collection)
    connection.execute("UPDATE collections SET replaced = generation WHERE name = ?", (collection,))
    return True


def _load(connection: sqlite3.Connection, rows: NDArray[np.int64], dimension: int) -> NDArray[np.float32]:
    vectors = np.empty((len(rows), dimension), np.float32)
    count = 0
    sql = "SELECT vector FROM vectors WHERE chunk IN (SELECT value FROM json_each(?)) ORDER BY chunk"
    for (blob,) in connection.execute(sql, (json.dumps(rows.tolist()),)):
        if len(blob) != 4 * dimension:
            raise CatalogCorrupt("a stored vector has the wrong length; run `ragkv reindex`")
        vectors[count] = np.frombuffer(blob, np.float32)
        count += 1
    if count != len(rows):
        raise CatalogCorrupt(f"{len(rows) - count} chunks have no vector; run `ragkv reindex`")
    return vectors
