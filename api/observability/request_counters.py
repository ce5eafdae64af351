"""Requests: how many came, by route, method and status, whoever answered them."""

from __future__ import annotations

from collections import Counter

from api.middleware.access_log import ServedRequest


class RequestCounters:
    """counts: by (route, method, status). There are as many labels as there are routes. Of one event loop."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def came(self, served: ServedRequest) -> None:
        """The observer that counts a request that is done. status: 0 where the client has gone before it had one."""
        self.counts[served.route, served.method, str(served.status)] += 1
