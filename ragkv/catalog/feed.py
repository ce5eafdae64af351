"""Queries on what changed: the feed that keeps the word indexes of replicas fresh.

A chunk never changes, and the rows of a collection grow in the order in which its changes are committed. So chunks
behind the last known row are new, and no other chunk is.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import bindparam, func, select

from ragkv.catalog.models import Passage, PassageChanges
from ragkv.catalog.tables import chunks, collections
from ragkv.catalog.transaction import Transaction
from ragkv.catalog.vectors import generations

_NOTHING = np.empty(0, np.int64)
_GENERATIONS = select(collections.c.name, collections.c.generation)
_MINE = chunks.c.collection == bindparam("collection")
_ADDED = (
    select(chunks.c.row, chunks.c.title, chunks.c.text)
    .where(_MINE, chunks.c.row > bindparam("last"))
    .order_by(chunks.c.row)
    .limit(bindparam("most"))
)
_KNOWN = (_MINE, chunks.c.row <= bindparam("last"))
_COUNT = select(func.count()).select_from(chunks).where(*_KNOWN)
_ROWS = select(chunks.c.row).where(*_KNOWN)


def all_generations(transaction: Transaction) -> dict[str, int]:
    """Return the generation of every collection that was ever changed."""
    return dict(transaction.execute(_GENERATIONS))


def passage_changes(
    transaction: Transaction, collection: str, known: NDArray[np.int64], since: int, limit: int
) -> PassageChanges:
    """Return what changed since generation `since`; see `Catalog.passage_changes`."""
    generation = generations(transaction, collection)[0]
    if generation == since:
        return PassageChanges(generation, _NOTHING, (), True)
    last = int(known[-1]) if len(known) else 0
    parameters = {"collection": collection, "last": last, "most": limit + 1}
    found = [Passage(*row) for row in transaction.execute(_ADDED, parameters)]
    complete = len(found) <= limit
    removed = _removed(transaction, collection, known)
    return PassageChanges(generation if complete else since, removed, tuple(found[:limit]), complete)


def _removed(transaction: Transaction, collection: str, known: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the known rows that are gone. They are listed only where the count says that there are some."""
    if not len(known):
        return _NOTHING
    parameters = {"collection": collection, "last": int(known[-1])}
    if transaction.scalar(_COUNT, parameters) == len(known):
        return _NOTHING
    found = transaction.execute(_ROWS, parameters)
    return np.setdiff1d(known, np.fromiter((row for (row,) in found), np.int64))
