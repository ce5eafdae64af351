"""An LRU cache of parsed head records in host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import fields

from torch import Tensor

from ragkv.store.format.head import Head
from ragkv.types import Key


class HeadCache:
    """Keeps parsed head records and evicts the least recently used ones. Thread-safe."""

    def __init__(self, budget: int):
        """Create an empty cache.

        Args:
            budget: Bytes of host memory that the records may take.
        """
        self._budget, self._bytes = budget, 0
        self._heads: OrderedDict[Key, Head] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Head | None:
        """Return the head record of a chunk, or None. The record becomes the most recently used one."""
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
            return self._heads.get(key)

    def put(self, key: Key, head: Head) -> None:
        """Add a head record, then evict old records until the cache fits its budget."""
        with self._lock:
            self._remove(key)
            self._heads[key] = head
            self._bytes += _memory_bytes(head)
            while self._bytes > self._budget:
                self._remove(next(iter(self._heads)))

    def drop(self, key: Key) -> None:
        """Remove the head record of a chunk, if it is cached."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        head = self._heads.pop(key, None)
        if head is not None:
            self._bytes -= _memory_bytes(head)


def _memory_bytes(head: Head) -> int:
    """Return the bytes that a head record takes in memory. Its digest is larger there than in the store."""
    digest: list[Tensor] = [getattr(head.digest, field.name) for field in fields(head.digest)]
    return sum(tensor.numel() * tensor.itemsize for tensor in digest) + head.tags.nbytes + 32 * len(head.tokens)
