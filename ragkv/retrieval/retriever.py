"""Retriever: which chunks a question needs. Vectors find what is meant, BM25 finds what is named; ranks are fused.

Reciprocal rank fusion: Cormack, Clarke, Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
Learning Methods", SIGIR 2009.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.retrieval.index import VectorIndex
from ragkv.types import Chunk, Filter, Hit

logger = logging.getLogger(__name__)


class TextEmbedder(Protocol):
    """What turns texts into vectors."""

    @property
    def identity(self) -> EmbedderIdentity:
        """Name and dimension."""
        ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[len(texts), dimension] float32, each row of length 1."""
        ...


@dataclass(frozen=True)
class Retrieval:
    """rank_constant: k of reciprocal rank fusion; larger, and the first ranks count for less against the later ones
    candidates: chunks taken from each list for every chunk wanted
    flat_limit: vectors of a collection up to which the search is exact. A search over 384 dimensions on one core
        took 1.4 ms at 10,000 vectors, 11 ms at 100,000, 23 ms at 200,000, about what embedding the question takes;
        an HNSW graph answers in 1 ms but takes 36 s per 100,000 vectors to build, on two cores.
    """

    rank_constant: int = 60
    candidates: int = 4
    flat_limit: int = 200_000


DEFAULTS = Retrieval()
SEARCHES = 3
"""How often one question is looked up at most while other processes change the collection under it."""


def _drop(chunks: Sequence[Chunk]) -> None:
    """Nobody wants to know early."""


class Retriever:
    """Search over the collections of a catalogue. Thread-safe: one lock around the indexes and the embedder."""

    def __init__(self, catalog: Catalog, embedder: TextEmbedder, folder: Path, parameters: Retrieval = DEFAULTS):
        """folder: where indexes are kept between runs; may be deleted at any time."""
        self.catalog = catalog
        self.embedder = embedder
        self.folder = folder
        self.parameters = parameters
        self._indexes: dict[str, VectorIndex] = {}
        self._saved: dict[str, int] = {}
        self._lock = threading.Lock()

    def search(
        self,
        question: str,
        collection: str = "default",
        top_k: int = 6,
        early: Callable[[Sequence[Chunk]], None] = _drop,
        wanted: Filter | None = None,
    ) -> list[Hit]:
        """The `top_k` chunks that fit the question best, best first; [] for an empty collection.

        early: told the best `top_k` by words alone, before the question is embedded, which takes longer · wanted: only
        documents it describes are searched. Raises EmbedderChanged; InputError for what is no filter.
        """
        count = top_k * self.parameters.candidates
        named = [row for row, _ in self.catalog.match(collection, question, count, wanted)]
        early(list(self.catalog.chunks(collection, named[:top_k]).values()))
        for _ in range(SEARCHES):
            with self._lock:
                index = self._current(collection)
                if not len(index):
                    return []
                near = self._near(index, collection, question, count, wanted)
            ranked = fuse([near, named], self.parameters.rank_constant)
            chunks = self.catalog.chunks(collection, [row for row, _ in ranked])
            if len(chunks) == len(ranked):
                break
            # Another process deleted or replaced what was ranked: its new version is only found by looking again.
            named = [row for row, _ in self.catalog.match(collection, question, count, wanted)]
        # A chunk deleted since it was ranked is gone from `chunks`, and the next one moves up.
        return [Hit(chunks[row], score, row) for row, score in ranked if row in chunks][:top_k]

    def refresh(self, collection: str) -> None:
        """Bring the index of a collection up to date with the catalogue. Raises EmbedderChanged."""
        with self._lock:
            self._current(collection)

    def save(self) -> None:
        """Write the indexes that changed since they were last written, so that the next start need not build them.

        A fault here costs the next start some time and is only logged.
        """
        with self._lock:
            for collection, index in self._indexes.items():
                if self._saved.get(collection) == index.generation:
                    continue
                try:
                    index.save(self._path(collection), collection)
                    self._saved[collection] = index.generation
                except OSError as error:
                    logger.warning("the index of %r was not saved: %s", collection, error)

    def _near(self, index: VectorIndex, collection: str, question: str, count: int, wanted: Filter | None) -> list[int]:
        """The `count` nearest rows to the question, of those wanted."""
        vector = self.embedder.encode([question])[0]
        if not wanted:
            return index.search(vector, count)
        for _ in range(SEARCHES):
            generation, rows = self.catalog.among(collection, wanted)
            if generation == index.generation:
                break
            index = self._current(collection)  # another process changed the collection in between
        return index.search_among(rows, vector, count)

    def _current(self, collection: str) -> VectorIndex:
        identity = self.embedder.identity
        self.catalog.check_embedder(identity)
        generation = self.catalog.generation(collection)
        # Taken out until it is whole again: an update that fails half-way must not be searched or updated further.
        index = self._indexes.pop(collection, None)
        if index is None or index.dimension != identity.dimension:
            index = self._load(collection, generation, identity.dimension)
        if index.generation != generation:
            index.apply(self.catalog.changes(collection, index.rows, index.generation))
        if generation:  # nothing is kept for names that were only asked for
            self._indexes[collection] = index
        return index

    def _load(self, collection: str, generation: int, dimension: int) -> VectorIndex:
        limit = self.parameters.flat_limit
        index = VectorIndex.load(self._path(collection), collection, generation, dimension, limit)
        if index is None:
            return VectorIndex(dimension, limit)
        self._saved[collection] = generation
        return index

    def _path(self, collection: str) -> Path:
        # Hashed: a collection name is a user's text and must not become a path.
        return self.folder / f"{hashlib.sha256(collection.encode()).hexdigest()[:32]}.faiss"


def fuse(lists: Sequence[Sequence[int]], rank_constant: int) -> list[tuple[int, float]]:
    """[(row, score)], best first: score = sum over the lists of 1 / (rank_constant + rank), ranks from 1."""
    scores: dict[int, float] = {}
    for ranked in lists:
        for rank, row in enumerate(ranked, start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (rank_constant + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
