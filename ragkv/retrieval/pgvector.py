"""PgVectors: vector search inside PostgreSQL (ragkv/catalog/pgvector.py), for what does not fit into memory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.catalog.pgvector import EXACT
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.scope import SearchScope
from ragkv.retrieval.vectors import OpenVectors

COUNTED_SECONDS = 60.0
"""Seconds for which the size of a large collection is not counted again."""


@dataclass(frozen=True)
class _OpenCollection:
    catalog: Catalog
    collection: str
    embedder: EmbedderIdentity | None
    size: int
    exact: bool

    def nearest(self, scope: SearchScope, vector: NDArray[np.float32], count: int) -> list[int]:
        embedder, rows = self.catalog.nearest(self.collection, vector, count, scope.filter, scope.documents)
        # Where the vectors came from another embedder meanwhile, the words decide for this once.
        return rows if embedder == self.embedder else []


class PgVectors:
    """Searches the vectors in the catalogue. Nothing is kept in this process, so nothing is stale. Thread-safe."""

    def __init__(self, catalog: Catalog, freshness: Freshness):
        """Prepare the catalogue, which copies all vectors at the first time.

        Raises:
            ConfigError: The catalogue is not in PostgreSQL, or the server does not have pgvector.
        """
        catalog.prepare_vector_search()
        self._catalog = catalog
        self._freshness = freshness
        self._lock = threading.Lock()
        self._sizes: dict[str, tuple[int, float]] = {}
        self._indexed = set[int]()

    def open(self, collection: str, dimension: int) -> OpenVectors:
        """Return the vectors of a collection."""
        state = self._freshness.state(collection)
        if not state.generation:
            return _OpenCollection(self._catalog, collection, state.embedder, 0, True)
        size = self._catalog.count_vectors(collection, EXACT + 1)
        if size <= EXACT:
            return _OpenCollection(self._catalog, collection, state.embedder, size, True)
        size_of = state.embedder.dimension if state.embedder else dimension
        if size_of not in self._indexed:
            self._catalog.index_vectors(size_of)
            self._indexed.add(size_of)
        return _OpenCollection(self._catalog, collection, state.embedder, self._size(collection), False)

    def refresh(self, collection: str, dimension: int) -> None:
        """Do nothing: the transactions of the catalogue keep the vectors up to date."""

    def generations(self) -> dict[str, int]:
        """Return {}: nothing can be behind."""
        return {}

    def save(self) -> None:
        """Do nothing: nothing is kept in this process."""

    def _size(self, collection: str) -> int:
        """Return how many vectors a large collection has, or had lately: counting them takes a while."""
        with self._lock:
            size, counted = self._sizes.get(collection, (0, -COUNTED_SECONDS))
        if time.monotonic() - counted >= COUNTED_SECONDS:
            size = self._catalog.count_vectors(collection)
            with self._lock:
                self._sizes[collection] = (size, time.monotonic())
        return size
