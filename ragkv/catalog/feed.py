"""Queries on what changed: the feed that keeps the word indexes of replicas fresh.

A chunk never changes, and the rows of a collection grow in the order in which its changes are committed. So chunks
behind the last known row are new, and no other chunk is.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import sqlite3

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog.models import Passage, PassageChanges
from ragkv.catalog.vectors import generations

_NOTHING = np.empty(0, np.int64)


def all_generations(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the generation of every collection that was ever changed."""
    return dict(connection.execute("SELECT name, generation FROM collections"))


def passage_changes(
    connection: sqlite3.Connection, collection: str, known: NDArray[np.int64], since: int, limit: int
) -> PassageChanges:
    """Return what changed since generation `since`; see `Catalog.passage_changes`."""
    generation = generations(connection, collection)[0]
    if generation == since:
        return PassageChanges(generation, _NOTHING, (), True)
    last = int(known[-1]) if len(known) else 0
    sql = "SELECT row, title, text FROM chunks WHERE collection = ? AND row > ? ORDER BY row LIMIT ?"
    found = [Passage(*row) for row in connection.execute(sql, (collection, last, limit + 1))]
    complete = len(found) <= limit
    removed = _removed(connection, collection, known)
    return PassageChanges(generation if complete else since, removed, tuple(found[:limit]), complete)


def _removed(connection: sqlite3.Connection, collection: str, known: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the known rows that are gone. They are listed only where the count says that there are some."""
    if not len(known):
        return _NOTHING
    arguments = (collection, int(known[-1]))
    count = connection.execute("SELECT count(*) FROM chunks WHERE collection = ? AND row <= ?", arguments).fetchone()[0]
    if count == len(known):
        return _NOTHING
    found = connection.execute("SELECT row FROM chunks WHERE collection = ? AND row <= ?", arguments)
    return np.setdiff1d(known, np.fromiter((row for (row,) in found), np.int64))
