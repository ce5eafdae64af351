"""How many connections an address may have (connections.py)."""

from __future__ import annotations

import logging
import time
from collections import Counter

LOG_SECONDS = 60.0
"""Least time between two log lines about refused connections."""

logger = logging.getLogger("ragkv.api")


class Connections:
    """The open connections of a service, by the address of the client.

    Attributes:
        most: Connections that one address may have; 0 for any number.
        refused: Connections over that number since the start.
    """

    def __init__(self, most: int):
        self.most, self.refused = most, 0
        self._open: Counter[str] = Counter()
        self._logged = (0, 0.0)

    def __len__(self) -> int:
        return self._open.total()

    def add(self, client: str) -> bool:
        """Count a connection. Return whether the client may have it."""
        self._open[client] += 1
        if not self.most or self._open[client] <= self.most:
            return True
        self.refused += 1
        count, when = self._logged
        if not count or time.monotonic() - when >= LOG_SECONDS:
            new = self.refused - count
            logger.warning("%d connections over RAGKV_CONNECTIONS (%d), the last one from %s", new, self.most, client)
            self._logged = self.refused, time.monotonic()
        return False

    def drop(self, client: str) -> None:
        """Stop to count a connection."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
