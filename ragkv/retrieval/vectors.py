"""Vector search: the interface of the retriever to an index of vectors, and its implementation with FAISS."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.index import VectorIndex
from ragkv.retrieval.scope import SearchScope

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often a search is repeated at most if other processes change the collection meanwhile."""


class OpenVectors(Protocol):
    """The vectors of a collection, ready for a search."""

    @property
    def embedder(self) -> EmbedderIdentity | None:
        """The embedder of the vectors; None while the catalogue has no chunks at all."""
        ...

    @property
    def size(self) -> int:
        """Number of vectors."""
        ...

    @property
    def exact(self) -> bool:
        """Whether every vector is compared."""
        ...

    def nearest(self, scope: SearchScope, vector: NDArray[np.float32], count: int) -> list[int]:
        """Return the `count` nearest chunk rows to `vector` [dimension] inside the scope, nearest first."""
        ...


class VectorSearch(Protocol):
    """The interface of an index of all collections."""

    def open(self, collection: str, dimension: int) -> OpenVectors:
        """Return the vectors of a collection, as fresh as the settings ask for.

        Args:
            collection: The collection.
            dimension: Dimension of the present embedder.
        """
        ...

    def refresh(self, collection: str, dimension: int) -> None:
        """Bring a collection up to date, without blocking searches where that is possible."""
        ...

    def generations(self) -> dict[str, int]:
        """Return the generation of the catalogue that each collection has here."""
        ...

    def save(self) -> None:
        """Write changed indexes to disk, so that the next start does not have to rebuild them."""
        ...


@dataclass(frozen=True)
class _OpenIndex:
    """The index of a collection. Used under the lock of the retriever."""

    vectors: FaissVectors
    collection: str
    index: VectorIndex
    embedder: EmbedderIdentity | None

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def exact(self) -> bool:
        return not self.index.graph

    def nearest(self, scope: SearchScope, vector: NDArray[np.float32], count: int) -> list[int]:
        return self.vectors.nearest(self, scope, vector, count)


class FaissVectors:
    """A FAISS index for each collection, in the memory of this process. Thread-safe by the lock that it is given."""

    def __init__(self, catalog: Catalog, folder: Path, freshness: Freshness, flat_limit: int):
        """Create it without any index.

        Args:
            catalog: The catalogue that the indexes are built from.
            folder: Folder that keeps the indexes between runs. It may be deleted at any time.
            freshness: Tells which state of a collection a search needs.
            flat_limit: As in `Retrieval`.
        """
        self._catalog = catalog
        self._folder = folder
        self._freshness = freshness
        self._flat_limit = flat_limit
        self._lock = threading.RLock()
        self._indexes: dict[str, VectorIndex] = {}
        self._saved: dict[str, int] = {}

    def open(self, collection: str, dimension: int) -> OpenVectors:
        """Return the index of a collection, after an update if it is not as fresh as the settings ask for."""
        with self._lock:
            return self._current(collection, dimension)

    def nearest(self, opened: _OpenIndex, scope: SearchScope, vector: NDArray[np.float32], count: int) -> list[int]:
        """Return the `count` nearest rows of an index inside the scope, nearest first."""
        with self._lock:
            index = opened.index
            if scope.whole:
                return index.search(vector, count)
            for _ in range(MAX_ATTEMPTS):
                generation, rows = self._catalog.filtered_rows(scope.collection, scope.filter, scope.documents)
                if generation == index.generation:
                    break
                # The collection changed meanwhile, or since its state was last read.
                self._freshness.expire(scope.collection)
                now = self._current(scope.collection, index.dimension)
                if now.embedder != opened.embedder:
                    return []  # Its vectors come from another embedder since then. For this once the words decide.
                index = now.index
            return index.search_among(rows, vector, count)

    def refresh(self, collection: str, dimension: int) -> None:
        """Bring a collection up to date. Searches use the index while the changes are read."""
        with self._lock:
            index = self._indexes.get(collection)
            generation, rows = (index.generation, index.rows) if index else (0, np.empty(0, np.int64))
        state = self._freshness.state(collection)
        same = state.embedder is None or (index is not None and index.dimension == state.embedder.dimension)
        if index is not None and same and generation != state.generation:
            changes = self._catalog.changes(collection, rows, generation)
            with self._lock:
                untouched = self._indexes.get(collection) is index and index.generation == generation
                if untouched and changes.embedder == state.embedder:
                    del self._indexes[collection]  # An update that fails half-way must leave nothing behind.
                    index.apply(changes)
                    self._indexes[collection] = index
                    self._freshness.learn(collection, changes.generation)
        with self._lock:
            self._current(collection, dimension)

    def generations(self) -> dict[str, int]:
        """Return the generation of the catalogue that each collection has here."""
        return {collection: index.generation for collection, index in list(self._indexes.items())}

    def save(self) -> None:
        """Write changed indexes to disk, so that the next start does not have to rebuild them.

        An error is only logged, because it merely makes the next start slower.
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

    def _current(self, collection: str, dimension: int) -> _OpenIndex:
        state = self._freshness.state(collection)
        embedder, generation = state.embedder, state.generation
        if embedder is not None:
            dimension = embedder.dimension
        # The index is put back only after a successful update: one that failed half-way must not be used again.
        index = self._indexes.pop(collection, None)
        if index is None or index.dimension != dimension:
            index = self._load(collection, generation, dimension)
        if index.generation != generation:
            changes = self._catalog.changes(collection, index.rows, index.generation)
            if changes.embedder is not None and changes.embedder != embedder:  # The vectors were changed just now.
                embedder = changes.embedder
                index = VectorIndex(embedder.dimension, self._flat_limit)
                changes = self._catalog.changes(collection, index.rows, 0)
            index.apply(changes)
            self._freshness.learn(collection, changes.generation)
        if generation:  # Unknown collections are not remembered.
            self._indexes[collection] = index
        return _OpenIndex(self, collection, index, embedder)

    def _load(self, collection: str, generation: int, dimension: int) -> VectorIndex:
        index = VectorIndex.load(self._path(collection), collection, generation, dimension, self._flat_limit)
        if index is None:
            return VectorIndex(dimension, self._flat_limit)
        self._saved[collection] = generation
        return index

    def _path(self, collection: str) -> Path:
        # The name is hashed because it is user input and must not become a path.
        return self._folder / f"{hashlib.sha256(collection.encode()).hexdigest()[:32]}.faiss"
