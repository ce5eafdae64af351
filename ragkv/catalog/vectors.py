"""Queries on vectors and on generations.

A collection's generation grows with every change. An index compares generations to find out whether it is stale.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import bindparam, delete, exists, insert, or_, select, update

from ragkv.catalog import embedders, pgvector, tables
from ragkv.catalog.models import Changes, EmbedderIdentity
from ragkv.catalog.statements import larger, upsert, values
from ragkv.catalog.tables import chunks, collections, next_vectors
from ragkv.catalog.transaction import Transaction
from ragkv.errors import CatalogCorrupt, InputError

_VECTORS = tables.vectors
# A document that came while the embedder changes has next vectors alone, until those of its collection are complete.
_SEARCHABLE = (
    select(chunks.c.row)
    .where(chunks.c.collection == bindparam("of"))
    .where(
        or_(
            ~exists(select(1).select_from(next_vectors).where(next_vectors.c.chunk == chunks.c.row)),
            exists(select(1).select_from(_VECTORS).where(_VECTORS.c.chunk == chunks.c.row)),
        )
    )
    .order_by(chunks.c.row)
)
_RAISE = upsert(
    collections,
    ["name"],
    lambda new: {"generation": larger(collections.c.generation + 1, new.generation)},
)
_GENERATIONS = select(collections.c.generation, collections.c.replaced).where(collections.c.name == bindparam("of"))
_NAMES = select(collections.c.name)
_REPLACED = update(collections).values(replaced=collections.c.generation)
_REPLACED_OF = _REPLACED.where(collections.c.name == bindparam("of"))
_ROWS = select(chunks.c.row).order_by(chunks.c.row)
_DELETE = delete(_VECTORS)
_INSERT = insert(_VECTORS)
_WANTED = select(values("rows", "bigint").c.value)
_OF_ROWS = select(_VECTORS.c.chunk, _VECTORS.c.vector).where(_VECTORS.c.chunk.in_(_WANTED))
_LOAD = select(_VECTORS.c.vector).where(_VECTORS.c.chunk.in_(_WANTED)).order_by(_VECTORS.c.chunk)


def raise_generation(transaction: Transaction, collection: str) -> None:
    """Raise the generation of a collection that changed, and wake those who wait for changes."""
    # The clock makes sure that no generation is used twice after the catalogue was restored from a backup.
    transaction.execute(_RAISE, {"name": collection, "generation": time.time_ns()})
    transaction.notify()


def generations(transaction: Transaction, collection: str) -> tuple[int, int]:
    """Return (the generation now, the generation at which all vectors were last replaced).

    Both are 0 for an unknown collection.
    """
    generation, replaced = transaction.execute(_GENERATIONS, {"of": collection}).fetchone() or (0, 0)
    return generation, replaced


def changes(transaction: Transaction, collection: str, known: NDArray[np.int64], since: int) -> Changes:
    """Return what changed since generation `since`; see `Catalog.changes`."""
    generation, replaced = generations(transaction, collection)
    identity = embedders.of_collection(transaction, collection)
    found = transaction.execute(_SEARCHABLE, {"of": collection})
    rows = np.fromiter((row for (row,) in found), np.int64)
    kept = np.intersect1d(known, rows) if since >= replaced else known[:0]
    added = np.setdiff1d(rows, kept)
    vectors = _load(transaction, added, identity.dimension if identity else 0)
    return Changes(generation, np.setdiff1d(known, kept), added, vectors, identity)


def of_rows(transaction: Transaction, rows: Iterable[int]) -> dict[int, NDArray[np.float32]]:
    """Return the vectors [dimension] of the chunks at these rows. Rows that no longer exist are left out."""
    found = transaction.execute(_OF_ROWS, {"rows": transaction.array(int(row) for row in rows)})
    return {row: np.frombuffer(blob, np.float32) for row, blob in found}


def replace(
    transaction: Transaction, rows: Sequence[int], vectors: NDArray[np.float32], identity: EmbedderIdentity
) -> None:
    """Replace the vectors of all chunks; see `Catalog.replace_vectors`."""
    present = [row for (row,) in transaction.execute(_ROWS)]
    if present != list(rows):
        raise InputError("documents changed while they were embedded again; run `ragkv reindex` once more")
    transaction.execute(_DELETE)
    blobs = (vector.tobytes() for vector in np.ascontiguousarray(vectors, dtype=np.float32))
    transaction.execute_all(_INSERT, ({"chunk": row, "vector": blob} for row, blob in zip(rows, blobs, strict=True)))
    embedders.record(transaction, identity)
    pgvector.replace(transaction)
    for (name,) in transaction.execute(_NAMES).fetchall():
        raise_generation(transaction, name)
    transaction.execute(_REPLACED)


def swap(transaction: Transaction, collection: str, identity: EmbedderIdentity) -> bool:
    """Put next vectors in the place of the present ones; see `Catalog.swap_vectors`."""
    if not embedders.swap(transaction, collection, identity):
        return False
    raise_generation(transaction, collection)
    transaction.execute(_REPLACED_OF, {"of": collection})
    return True


def _load(transaction: Transaction, rows: NDArray[np.int64], dimension: int) -> NDArray[np.float32]:
    vectors = np.empty((len(rows), dimension), np.float32)
    count = 0
    for (blob,) in transaction.execute(_LOAD, {"rows": transaction.array(rows.tolist())}):
        if len(blob) != 4 * dimension:
            raise CatalogCorrupt("a stored vector has the wrong length; run `ragkv reindex`")
        vectors[count] = np.frombuffer(blob, np.float32)
        count += 1
    if count != len(rows):
        raise CatalogCorrupt(f"{len(rows) - count} chunks have no vector; run `ragkv reindex`")
    return vectors
