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

STEP = 20_000
"""Chunks that one transaction adds. Other processes and collections wait for it, about a second."""
COMPARED = 100
"""Chunks of a collection that are compared with the catalogue before the first update."""

_MATCH = f"""
SELECT chunks.row, -bm25(chunk_words, {full_text.TITLE_WEIGHT}, {full_text.TEXT_WEIGHT}) AS score
FROM chunk_words JOIN chunks ON chunks.row = chunk_words.rowid
WHERE chunk_words MATCH ? AND chunks.collection = ? AND {{condition}} ORDER BY score DESC, chunks.row LIMIT ?
"""
_AMONG = "chunks.row IN (SELECT value FROM json_each(?))"


class WordIndex(Protocol):
    """The interface of a word index. Implementations are thread-safe."""

    def match(self, scope: SearchScope, text: str, count: int, every: bool = False) -> list[tuple[int, float]]:
        """Return (chunk row, BM25 score) of the best chunks of a scope, best first.

        They share a word with the text, or have `every` word of a text of several.
        """
        ...

    def refresh(self, collection: str) -> None:
        """Bring a collection up to date."""
        ...

    def generations(self) -> dict[str, int]:
        """Return the generation of the catalogue that each collection has here; {} where none can be behind."""
        ...

    def close(self) -> None:
        """Close files."""
        ...


class CatalogWords:
    """The full-text index inside the catalogue. It changes in the transactions of the catalogue."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog

    def match(self, scope: SearchScope, text: str, count: int, every: bool = False) -> list[tuple[int, float]]:
        """Return (chunk row, BM25 score) of the best chunks of a scope, best first."""
        return self._catalog.match(scope.collection, text, count, scope.filter, scope.documents, every=every)

    def refresh(self, collection: str) -> None:
        """Do nothing: the index is always up to date."""

    def generations(self) -> dict[str, int]:
        """Return {}: the index cannot be behind."""
        return {}

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
        self._compared = set[str]()

    def match(self, scope: SearchScope, text: str, count: int, every: bool = False) -> list[tuple[int, float]]:
        """Return (chunk row, BM25 score) of the best chunks of a scope, best first.

        The catalogue applies a filter. A damaged file is rebuilt. Where the file cannot be written, its last state is
        searched, and where there is no file, nothing is found.
        """
        words, condition, parameters = full_text.query(text, every), "TRUE", list[str]()
        if not words:
            return []
        self.refresh(scope.collection)
        if not scope.whole:
            rows = self._catalog.filtered_rows(scope.collection, scope.filter, scope.documents)[1]
            condition, parameters = _AMONG, [json.dumps(rows.tolist())]
        sql, given = _MATCH.format(condition=condition), (words, scope.collection, *parameters, count)
        for attempt in range(2):
            try:
                with self._file.read() as connection:
                    return connection.execute(sql, given).fetchall()
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
                state = self._freshness.state(collection)
                with self._file.read() as connection:
                    present = _generation(connection, collection)
                if present != state.generation:
                    with self._updating:
                        self._update(collection)
                return
            except sqlite3.Error as error:
                if attempt or not is_damage(error):
                    logger.warning("the word index is not up to date: %s", error)
                    return
                self._file.discard(error)

    def generations(self) -> dict[str, int]:
        """Return the generation of the catalogue that each collection has here."""
        try:
            with self._file.read() as connection:
                return dict(connection.execute("SELECT name, generation FROM collections"))
        except sqlite3.Error as error:
            logger.warning("the word index was not read: %s", error)
            return {}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _update(self, collection: str) -> None:
        """Bring a collection up to date in transactions of `STEP` chunks.

        Each one reads the state of the file and then the changes since that state, so processes that share the file
        may take turns.
        """
        complete = False
        while not complete:
            with self._file.write() as connection:
                since = _generation(connection, collection)
                found = connection.execute("SELECT row FROM chunks WHERE collection = ? ORDER BY row", (collection,))
                known = np.fromiter((row for (row,) in found), np.int64)
                if not self._belongs(connection, collection, since, known):
                    logger.warning("the word index of %r is built again: the catalogue was replaced", collection)
                    connection.execute("DELETE FROM chunks WHERE collection = ?", (collection,))
                    since, known = 0, known[:0]
                changes = self._catalog.passage_changes(collection, known, since, STEP)
                gone = ((int(row),) for row in changes.removed)
                connection.executemany("DELETE FROM chunks WHERE row = ?", gone)
                new = ((each.row, collection, each.title, each.text) for each in changes.added)
                connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?)", new)
                # The generation of an unfinished update is the one before, or 0, so that it goes on.
                connection.execute("INSERT OR REPLACE INTO collections VALUES (?, ?)", (collection, changes.generation))
                complete = changes.complete
        self._freshness.learn(collection, changes.generation)

    def _belongs(self, connection: sqlite3.Connection, collection: str, since: int, known: NDArray[np.int64]) -> bool:
        """Return whether the chunks of a collection come from this catalogue and not from one that it replaced.

        After the restore of a backup the catalogue gives rows out again that the file may hold. They are the newest
        rows of the file, so these are compared, once in a process.
        """
        if since > self._catalog.generation(collection):
            return False
        if collection in self._compared:
            return True
        newest = known[-COMPARED:]
        sql = "SELECT row, title, text FROM chunks WHERE row >= ? AND collection = ?"
        found = connection.execute(sql, (int(newest[0]) if len(newest) else 0, collection)).fetchall()
        chunks = self._catalog.chunks(collection, newest)
        self._compared.add(collection)
        return all(
            (title, text) == (chunks[row].title, chunks[row].text) for row, title, text in found if row in chunks
        )


def _generation(connection: sqlite3.Connection, collection: str) -> int:
    found = connection.execute("SELECT generation FROM collections WHERE name = ?", (collection,)).fetchone()
    return int(found[0]) if found else 0
