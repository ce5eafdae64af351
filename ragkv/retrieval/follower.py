"""ViewFollower: a thread that keeps the views of this process close to the catalogue.

It waits for the catalogue's announcements of changes, and asks for the generations at least twice in the time that a
view may be behind. So a search finds its views fresh and asks nothing itself. A search does not rely on this thread:
where it is late, `Freshness` lets the search read the state itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ragkv.catalog import Catalog, ChangeListener
from ragkv.errors import RagkvError
from ragkv.retrieval.freshness import Freshness

logger = logging.getLogger(__name__)

SHORTEST, LONGEST = 0.05, 0.5
"""Seconds between two looks at the generations, at least and at most. `stop` waits for the longest."""


@dataclass(frozen=True)
class ViewStatus:
    """How far views are behind the catalogue.

    Attributes:
        age: Seconds since the view that is furthest behind was known to be up to date; 0 while nothing was searched.
        behind: Collections of which some view lacked changes when the generations were last read.
        refreshed: How often the thread brought the views of a collection up to date.
    """

    age: float
    behind: int
    refreshed: int


class ViewFollower:
    """The thread. `start` it once, and `stop` it before the catalogue is closed."""

    def __init__(
        self,
        catalog: Catalog,
        freshness: Freshness,
        views: Callable[[], Mapping[str, int]],
        refresh: Callable[[str], None],
    ):
        """Create it without starting it.

        Args:
            catalog: The catalogue to follow.
            freshness: What searches rely on.
            views: Returns the generation of the views of each collection: of the oldest of its views.
            refresh: Brings the views of a collection up to date.
        """
        self._catalog, self._freshness, self._views, self._refresh = catalog, freshness, views, refresh
        # Without any staleness every search looks itself, and this thread only saves it the update.
        self._interval = max(SHORTEST, min(freshness.staleness / 2 or LONGEST, LONGEST))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="views", daemon=True)
        self._equal: dict[str, float] = {}
        self._behind, self._refreshed = frozenset[str](), 0
        self._complaint = ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> ViewStatus:
        """Return how far the views are behind."""
        equal = list(self._equal.values())
        return ViewStatus(time.monotonic() - min(equal) if equal else 0.0, len(self._behind), self._refreshed)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._catalog.listener() as listener:
                    self._follow(listener)
            except Exception as error:
                self._complain("the views are not kept up to date in the background", error)
            self._stopping.wait(self._interval)

    def _follow(self, listener: ChangeListener) -> None:
        progress = False
        while not self._stopping.is_set():
            listener.wait(0 if progress else self._interval)
            self._compare()
            progress = False
            for collection in sorted(self._behind):
                if self._stopping.is_set():
                    return
                try:
                    self._refresh(collection)
                except Exception as error:
                    self._complain(f"the views of {collection!r} cannot be brought up to date", error)
                else:
                    self._refreshed += 1
                    progress = True
            if not self._behind:
                self._complaint = ""

    def _complain(self, what: str, error: Exception) -> None:
        """Log a failure once. Searches meet the same one, and look for themselves until it is over."""
        complaint = f"{what}: {error}"
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning(complaint, exc_info=None if isinstance(error, RagkvError) else error)

    def _compare(self) -> None:
        """Compare the views with the catalogue."""
        read, views = time.monotonic(), self._views()
        generations = self._catalog.generations()
        for collection in views:
            self._freshness.confirm(collection, generations.get(collection, 0), read)
        behind = {collection for collection, known in views.items() if known != generations.get(collection, 0)}
        self._equal = {
            collection: self._equal.get(collection, read) if collection in behind else read for collection in views
        }
        self._behind = frozenset(behind)
