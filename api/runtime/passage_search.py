"""Searches for passages. They need the embedder and the indexes and not the model, so the engine's thread is not asked.

Few searches run at a time, because each of them computes. Others wait, as many as the setting `queue` allows.
"""

from __future__ import annotations

import anyio
import anyio.to_thread

from ragkv.errors import Busy
from ragkv.passages import SearchResult
from ragkv.retrieval import Retriever, SearchScope, ViewStatus

RUNNING = 2
"""Searches that run at a time."""
RETRY_SECONDS = 1
"""After so many seconds a search that was refused may come back: a search takes milliseconds."""


class PassageSearch:
    """Runs searches in threads. Its methods belong to one event loop."""

    def __init__(self, retriever: Retriever, capacity: int):
        """Set up the search. capacity: searches that may run and wait."""
        self._retriever, self._capacity, self._pending = retriever, capacity, 0
        self._limiter = anyio.CapacityLimiter(RUNNING)

    def view_status(self) -> ViewStatus | None:
        """Return how far the search views are behind the catalogue; None where they cannot be. Any thread may ask."""
        return self._retriever.views.status()

    async def find(self, query: str, scope: SearchScope, top_k: int) -> SearchResult:
        """Search for passages. Raises as `Retriever.find_passages`, and Busy if too many searches wait."""
        if self._pending >= self._capacity:
            raise Busy(self._pending, RETRY_SECONDS)
        self._pending += 1
        try:
            find = self._retriever.find_passages
            return await anyio.to_thread.run_sync(find, query, scope, top_k, limiter=self._limiter)
        finally:
            self._pending -= 1
