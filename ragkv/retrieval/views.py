"""Views: the index of vectors and the index of words of all collections, and keeping them close to the catalogue."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ragkv.catalog import Catalog
from ragkv.retrieval.contract import Retrieval
from ragkv.retrieval.follower import ViewFollower, ViewStatus
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.pgvector import PgVectors
from ragkv.retrieval.vectors import FaissVectors, VectorSearch
from ragkv.retrieval.word_index import CatalogWords, ReplicaWords, WordIndex

UPDATE_PAUSE = 20.0
"""Pause between updates of a collection's views while it is ingested into, in times that an update takes."""


class Views:
    """Both indexes of every collection.

    Attributes:
        vectors: Searches by vectors.
        words: Searches by words.
        freshness: Knows which collections have changed since they were looked at.
    """

    def __init__(self, catalog: Catalog, folder: Path, parameters: Retrieval, dimension: Callable[[], int]):
        """Open the indexes.

        Args:
            catalog: The catalogue that they are views of.
            folder: Folder that keeps them between runs. It may be deleted at any time.
            parameters: Parameters of retrieval.
            dimension: Returns the dimension of the present embedder's vectors.
        """
        self.freshness = Freshness(catalog, parameters.staleness)
        self.vectors: VectorSearch
        if parameters.vectors == "pgvector":
            self.vectors = PgVectors(catalog, self.freshness)
        else:
            self.vectors = FaissVectors(catalog, folder, self.freshness, parameters.flat_limit)
        self.words: WordIndex = CatalogWords(catalog)
        if parameters.own_words or not catalog.has_words:
            self.words = ReplicaWords(catalog, folder / "words.sqlite", self.freshness)
        self._catalog, self._dimension = catalog, dimension
        self._follower: ViewFollower | None = None
        self._behind = set[str]()
        self._update_again = dict[str, float]()

    def refresh(self, collection: str) -> None:
        """Update the views of a collection to the state of the catalogue."""
        self._behind.discard(collection)
        self.freshness.expire(collection)
        self.vectors.refresh(collection, self._dimension())
        self.words.refresh(collection)

    def changed(self, collection: str) -> None:
        """Take note that a collection has changed. Every search sees the change.

        The views are updated now, so that no search has to, unless that has taken much of the time lately: an update
        reads which chunks the collection has, and one a document would make a long ingest quadratic.
        """
        self.freshness.expire(collection)
        self._behind.add(collection)
        started = time.monotonic()
        if started >= self._update_again.get(collection, 0.0):
            self.refresh(collection)
            ended = time.monotonic()
            self._update_again[collection] = ended + UPDATE_PAUSE * (ended - started)

    def save(self) -> None:
        """Write the changed indexes to disk, so that the next start does not have to rebuild them."""
        for collection in list(self._behind):
            self.refresh(collection)
        self.vectors.save()

    def start_follower(self) -> None:
        """Start to keep the views up to date in the background, until `close`.

        With the words in the catalogue nothing is started: its searches look at the catalogue anyway.
        """
        if self._follower is None and not isinstance(self.words, CatalogWords):
            self._follower = ViewFollower(self._catalog, self.freshness, self._view_generations, self._catch_up)
            self._follower.start()

    def status(self) -> ViewStatus | None:
        """Return how far the views are behind the catalogue; None where nothing follows it."""
        return self._follower.status() if self._follower else None

    def close(self) -> None:
        """Save the indexes and close their files. Call it before the catalogue is closed."""
        if self._follower is not None:
            self._follower.stop()
        self.save()
        self.words.close()

    def _catch_up(self, collection: str) -> None:
        """Bring the views of a collection up to date that are there. What was not searched is not loaded."""
        if collection in self.vectors.generations():
            self.vectors.refresh(collection, self._dimension())
        if collection in self.words.generations():
            self.words.refresh(collection)

    def _view_generations(self) -> dict[str, int]:
        """Return the generation of each collection that was searched: of the oldest of its views."""
        generations = self.vectors.generations()
        for collection, generation in self.words.generations().items():
            generations[collection] = min(generation, generations.get(collection, generation))
        return generations
