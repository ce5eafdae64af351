"""Freshness: what a process knows of the state of each collection, and for how long it relies on it.

The views of a process (the vector index, the word index) compare their generation with the state that `Freshness`
returns. The state is read from the catalogue if it was read more than `staleness` seconds ago, or if the catalogue
announced a change since then. So a search sees every change that was committed `staleness` seconds before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ragkv.catalog import Catalog, EmbedderIdentity


@dataclass(frozen=True)
class CollectionState:
    """The state of a collection.

    Attributes:
        embedder: The embedder of its vectors; None while there are no chunks at all.
        generation: Its generation.
        read: When this was true at the earliest, on the monotonic clock.
    """

    embedder: EmbedderIdentity | None
    generation: int
    read: float


class Freshness:
    """The known states of collections. Thread-safe."""

    def __init__(self, catalog: Catalog, staleness: float = 0.0, clock: Callable[[], float] = time.monotonic):
        """Create it with nothing known.

        Args:
            catalog: The catalogue.
            staleness: Seconds for which a state is relied on; 0 reads it every time.
            clock: Returns the present time in seconds.
        """
        self._catalog = catalog
        self.staleness = staleness
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, CollectionState] = {}

    def state(self, collection: str) -> CollectionState:
        """Return the state of a collection, at most `staleness` seconds old."""
        with self._lock:
            known = self._states.get(collection)
        now = self._clock()
        if known is not None and now - known.read < self.staleness:
            return known
        state = CollectionState(*self._catalog.state(collection), now)
        if state.generation:  # Unknown collections are not remembered.
            with self._lock:
                self._states[collection] = state
        return state

    def learn(self, collection: str, generation: int) -> None:
        """Forget the state of a collection if a view was found to be newer."""
        with self._lock:
            known = self._states.get(collection)
            if known is not None and known.generation != generation:
                del self._states[collection]

    def confirm(self, collection: str, generation: int, read: float) -> bool:
        """Record that a collection had this generation at the time `read`.

        Returns:
            Whether that was known. Otherwise the next `state` reads the catalogue.
        """
        with self._lock:
            known = self._states.get(collection)
            if known is None or known.generation != generation:
                self._states.pop(collection, None)
                return False
            if read > known.read:
                self._states[collection] = replace(known, read=read)
            return True

    def expire(self, collection: str) -> None:
        """Forget the state of a collection: something showed that it is out of date."""
        with self._lock:
            self._states.pop(collection, None)
