"""A real store to which something happens in the middle of a question."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ragkv.engine.engine import Engine
from ragkv.store.base import KVStore

METHODS = ("head", "read", "put", "delete", "ping")


class Interrupted:
    """The store of an engine, and a fault that is made right before its n-th read of a body.

    waited: seconds spent inside the store since · calls: what was asked of it since, in order.
    """

    def __init__(self, engine: Engine, reads: int, fault: Callable[[], object]):
        self._store: KVStore = engine.store
        self._left, self._fault = reads, fault
        self.waited, self.calls = 0.0, list[str]()
        engine.store = engine.tiers.store = self  # type: ignore[assignment]

    @property
    def happened(self) -> bool:
        """Whether the question got that far."""
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return (lambda *arguments: self._timed(name, method, arguments)) if name in METHODS else method

    def _timed(self, name: str, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "read":
            self._left -= 1
            if self._left == 0:
                self._fault()
        began = time.monotonic()
        try:
            return method(*arguments)
        finally:
            if self.happened:
                self.waited += time.monotonic() - began
                self.calls.append(name)
