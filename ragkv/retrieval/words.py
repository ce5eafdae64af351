"""Word indexes: full-text search with BM25, in the catalogue or beside it.

A catalogue in SQLite has a full-text index of its own (ragkv/catalog/full_text.py), which every transaction keeps up to
date. A catalogue on a server has none. There each process keeps `ReplicaWords`: a file (word_file.py) with the same
FTS5 table. Tokenizer, weights and query come from the same module, so equal chunks have equal scores.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, full_text
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.scope import SearchScope
from ragkv.retrieval.word_file import WordFile, is_damage

logger = logging.getLogger(__name__)

BATCH = 1000
"""Chunks that are read from the catalogue at a time."""
STEP = 20_000
"""Chunks that one transaction adds. Other processes and collections wait for it, about a second."""

_AMONG = "chunks.row IN (SELECT value FROM json_each(?))"


class WordIndex(Protocol):
    """The interface of a word index. Implementations are thread-safe."""

    def match(self, scope: SearchScope, text: str, count: int) -> list[tuple[int, float]]:
        """Return (chunk row, BM25 score) of the best chunks of a scope, best first."""
        ...

    def refresh(self, collection: str) -> None:
        """Bring a collection up to date."""
        ...

    def generation(self, collection: str) -> int | None:
        """Return the generation of the catalogue that a collection has here; None where it cannot be behind."""
        ...

    def close(self) -> None:
        """Close files."""
        ...


class CatalogWords:
    """The full-text index inside the catalogue. It changes in the transactions of the catalogue."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog

    def match(self, scope: SearchScope, text: str, count: int) -> list[tuple[int, float]]:
        """Return (chunk row, BM25 score) of the best chunks of a scope, best first."""
        return self._catalog.match(scope.collection, text, count, scope.filter, scope.documents)

    def refresh(self, collection: str) -> None:
        """Do nothing: the index is always up to date."""

    def generation(self, collection: str) -> None:
        """Return None: the index cannot be behind."""

    def close(self) -> None:
        """Do nothing: the catalogue is closed by whoever opened it."""


class ReplicaWords:
    """A full-text index of the collections that this machine searches, in a file of its own."""

    def __init__(self, catalog: Catalog, path: Path, freshness: Freshness):
        """Create the index; the file is opened by the first search.

        Args:
            catalog: The catalogue that the index is built from.
            path: The file.
            freshness: Tells which state of a collection a search needs.
        """
        self._catalog = catalog
        self._file = WordFile(path)
        self._freshness = freshness
        self._updating = threading.Lock()

    def match(self, scope: SearchScope, text: str, count: int) -> list[tuple[int, float]]:
        """Return (chunk row, BM25 score) of the best chunks of a scope, best first.

        The catalogue applies a filter. A damaged file is rebuilt. Where the file cannot be written, its last state is
        searched, and where there is no file, nothing is found.
        """
        condition, parameters = "TRUE", list[str]()
        self.refresh(scope.collection)
        if not scope.whole:
            rows = self._catalog.filtered_rows(scope.collection, scope.filter, scope.documents)[1]
            condition, parameters = _AMONG, [json.dumps(rows.tolist())]
        for attempt in range(2):
            try:
                with self._file.read() as connection:
                    return full_text.match_where(connection, scope.collection, text, count, condition, parameters)
            except sqlite3.Error as error:
                if attempt or not is_damage(error):
                    logger.warning("the word index was not searched: %s", error)
                    break
                self._file.discard(error)
                self.refresh(scope.collection)
        return []

    def refresh(self, collection: str) -> None:
        """Bring a collection up to date, or log why that is not possible."""
        for attempt in range(2):
            try:
                if self.generation(collection) != self._freshness.state(collection).generation:
                    with self._updating:
                        self._update(collection)
                return
            except sqlite3.Error as error:
                if attempt or not is_damage(error):
                    logger.warning("the word index is not up to date: %s", error)
                    return
                self._file.discard(error)

    def generation(self, collection: str) -> int:
        """Return the generation of the catalogue that a collection has here; 0 if it is not here. Raises sqlite3.Error."""
        with self._file.read() as connection:
            return _generation(connection, collection)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _update(self, collection: str) -> None:
        """Bring a collection up to date in transactions of `STEP` chunks.

        Each transaction compares the file with a snapshot of the catalogue, and the last one leaves them equal. If
        another process finishes an update meanwhile, a new snapshot is taken.
        """
        began, generation, rows, finished = -1, 0, np.empty(0, np.int64), False
        while not finished:
            with self._file.write() as connection:
                present = _generation(connection, collection)
                if present != began:
                    if present and present == self._freshness.state(collection).generation:
                        return
                    began = present
                    generation, rows = self._catalog.filtered_rows(collection, None)
                finished = self._approach(connection, collection, rows)
                if finished:
                    _set_generation(connection, collection, generation)
        self._freshness.learn(collection, generation)

    def _approach(self, connection: sqlite3.Connection, collection: str, rows: NDArray[np.int64]) -> bool:
        """Delete what is not in `rows` and insert at most `STEP` of what is missing; return whether all is there."""
        found = connection.execute("SELECT row FROM chunks WHERE collection = ?", (collection,))
        known = np.fromiter((row for (row,) in found), np.int64)
        gone, missing = np.setdiff1d(known, rows), np.setdiff1d(rows, known)
        connection.executemany("DELETE FROM chunks WHERE row = ?", ((int(row),) for row in gone))
        for start in range(0, min(len(missing), STEP), BATCH):
            batch = missing[start : start + BATCH]
            chunks = self._catalog.chunks(collection, batch)  # A chunk that was removed meanwhile is not there.
            columns = ((row, collection, chunk.title, chunk.text) for row, chunk in sorted(chunks.items()))
            connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?)", columns)
        return len(missing) <= STEP


def _generation(connection: sqlite3.Connection, collection: str) -> int:
    found = connection.execute("SELECT generation FROM collections WHERE name = ?", (collection,)).fetchone()
    return int(found[0]) if found else 0


def _set_generation(connection: sqlite3.Connection, collection: str, generation: int) -> None:
    connection.execute("INSERT OR REPLACE INTO collections VALUES (?, ?)", (collection, generation))
