"""Counts of served requests by route, method and status."""

from __future__ import annotations

from collections import Counter

from ragkv.api.middleware.access_log import ServedRequest


class RequestCounters:
    """Counts requests. Belongs to one event loop.

    Attributes:
        counts: Requests by (route, method, status). A route is a template, so the number of labels is bounded.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def count(self, served: ServedRequest) -> None:
        """Count a request that is done. Its status is 0 if the client disconnected before the response."""
        self.counts[served.route, served.method, str(served.status)] += 1
