"""ChangeListener: waits until collections change, in this process or in another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

POLL_SECONDS = 0.05
"""How often a file is asked whether it changed. It reads a counter in shared memory."""


class ChangeSignal(Protocol):
    """Wakes a listener. A change may wake it late or without need, but never not at all."""

    def wait(self, seconds: float) -> bool:
        """Wait until something may have changed. Returns whether it may have. Raises StoreUnavailable."""
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


class ChangeListener:
    """Waits for changes of collections. It belongs to one thread. Close it, or use it as a context manager."""

    def __init__(self, signal: ChangeSignal, generations: Callable[[], dict[str, int]]):
        """Take what wakes it, and what returns the generation of every collection."""
        self._signal, self._generations = signal, generations
        self._seen: dict[str, int] = {}
        self._stale = True

    def wait(self, timeout: float) -> frozenset[str]:
        """Wait until a collection has changed since the last call.

        The first call returns at once, with all collections.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Names of the collections whose generation changed; none when the time is over.

        Raises:
            StoreUnavailable: The catalogue does not answer. Call again later; nothing is missed.
        """
        end = time.monotonic() + timeout
        while True:
            if self._stale:
                changed = self._changed()
                if changed:
                    return changed
            left = max(0.0, end - time.monotonic())
            self._stale = True  # also where the wait fails: a change may be missed while there is no connection
            self._stale = self._signal.wait(left)
            if not self._stale:
                return frozenset()

    def _changed(self) -> frozenset[str]:
        now = self._generations()
        changed = frozenset(name for name, generation in now.items() if self._seen.get(name) != generation)
        self._seen, self._stale = now, False
        return changed

    def close(self) -> None:
        """Stop listening."""
        self._signal.close()

    def __enter__(self) -> ChangeListener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
