"""One tier: a pool of blocks over something slower.

Single flight: a block that is on its way is waited for, not read a second time, so a prefetch and the question that
follows it never read twice. A pool too small for a request, or filled by blocks in use, is passed by.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.store.layout import Part
from ragkv.store.pool import BlockPool, Name, PoolStats
from ragkv.types import Key

Seen = Counter[str]
"""Bytes by the tier that gave them."""


Bring = Callable[[Sequence[Part]], Tensor]
"""Where blocks come from: the bytes of parts, one after another, uint8. Raises StoreError."""


class Tier:
    """A pool over something slower (`below`). Thread-safe.

    width, everywhere: bytes of a row; parts are whole rows and so are slots.
    """

    def __init__(self, name: str, pool: BlockPool):
        self.name, self.pool = name, pool
        self._lock = threading.Lock()
        self._coming: dict[Name, threading.Event] = {}

    def bring(self, key: Key, width: int, found: Sequence[Part], below: Bring, seen: Seen) -> Tensor:
        """The bytes of the parts, one after another, uint8, on the pool's device, or where `below` brings them when
        there is no room. Raises StoreError."""
        with self.hold(key, width, found, below, seen) as slots:
            if slots is None:
                return below(found)
            data = self.pool.data
            rows = _rows(self.starts(slots), found, width).to(data.device)
            out = torch.empty((len(rows), width), dtype=torch.uint8, device=data.device, pin_memory=data.is_pinned())
            return torch.index_select(data.view(-1, width), 0, rows, out=out).flatten()

    def starts(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Where slots begin in the pool's bytes."""
        return np.array(slots, dtype=np.int64) * self.pool.size

    @contextmanager
    def hold(self, key: Key, width: int, found: Sequence[Part], below: Bring, seen: Seen) -> Iterator[list[int] | None]:
        """The slots of the parts, in order, pinned until the block ends; None when there is no room for them.

        Raises StoreError when what is below does not deliver.
        """
        slots: list[int | None] = [None] * len(found)
        try:
            room = len(found) <= self.pool.slots
            while room and None in slots:
                missing = [i for i, slot in enumerate(slots) if slot is None]
                room = self._fill(key, width, found, missing, slots, below, seen)
            yield [slot for slot in slots if slot is not None] if room else None
        finally:
            with self._lock:
                self.pool.release(slot for slot in slots if slot is not None)

    def absent(self, key: Key, found: Sequence[Part]) -> list[Part]:
        """Those of the parts that are not here at the moment."""
        with self._lock:
            return [part for part in found if not self.pool.holds((key, *part[:2]))]

    def drop(self, key: Key) -> None:
        """Forget a chunk."""
        with self._lock:
            self.pool.drop(key)

    def stats(self) -> PoolStats:
        """Of the pool."""
        with self._lock:
            return self.pool.stats()

    def _fill(
        self,
        key: Key,
        width: int,
        found: Sequence[Part],
        wanted: list[int],
        slots: list[int | None],
        below: Bring,
        seen: Seen,
    ) -> bool:
        """Find or bring the wanted parts, and wait for those that others bring; what these fail to bring stays None.
        False: no room."""
        names = [(key, *found[i][:2]) for i in wanted]
        flight = threading.Event()
        with self._lock:
            for i, slot in zip(wanted, self.pool.find(names), strict=True):
                slots[i] = slot
                seen[self.name] += found[i][3] if slot is not None else 0
            absent = [(i, name) for i, name in zip(wanted, names, strict=True) if slots[i] is None]
            mine = [(i, name) for i, name in absent if name not in self._coming]
            others = {id(self._coming[name]): self._coming[name] for _, name in absent if name in self._coming}
            taken = self.pool.take(len(mine))
            if taken is None:
                return False
            self._coming.update((name, flight) for _, name in mine)
        try:
            if mine:
                chosen = [found[i] for i, _ in mine]
                self._copy(below(chosen), taken, chosen, width)
        except BaseException:
            with self._lock:
                self.pool.release(taken)
            raise
        else:
            with self._lock:
                self.pool.name((name for _, name in mine), taken)
            for (i, _), slot in zip(mine, taken, strict=True):
                slots[i] = slot
        finally:
            with self._lock:
                for _, name in mine:
                    del self._coming[name]
            flight.set()
        for other in others.values():
            other.wait()
        return True

    def _copy(self, raw: Tensor, taken: Sequence[int], found: Sequence[Part], width: int) -> None:
        """Bytes of parts, one after another, into their slots."""
        data, rows = self.pool.data.view(-1, width), _rows(self.starts(taken), found, width)
        if data.device.type == "cpu":
            # By numpy: torch would make a second team of OpenMP threads for the thread that fetches ahead. With more
            # of them than processors libgomp's threads sleep where they spun, and every layer of the model waits for
            # them to wake: measured, a fifth of the time to the first token.
            data.numpy()[rows.numpy()] = raw.view(-1, width).numpy()
        else:
            data.index_copy_(0, rows.to(data.device), raw.to(data.device, non_blocking=True).view(-1, width))


def _rows(starts: NDArray[np.int64], found: Sequence[Part], width: int) -> Tensor:
    """The rows of `width` bytes that the parts take up when they begin at `starts` (multiples of it)."""
    counts = np.array([size for *_, size in found], dtype=np.int64) // width
    first = starts // width - (counts.cumsum() - counts)
    return torch.from_numpy(np.arange(int(counts.sum())) + first.repeat(counts))
