"""One tier: a pool of blocks over something slower.

Single flight: a block that is on its way is waited for, not read a second time, so a prefetch and the question that
follows it never read twice. A pool too small for a request, or filled by blocks in use, is passed by.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ragkv.store.block_pool import BlockPool, PoolStats
from ragkv.store.format.layout import BlockRanges, Numbers
from ragkv.types import Key

TierBytes = Counter[str]
"""Bytes by the tier that gave them."""


FetchBlocks = Callable[[BlockRanges], Tensor]
"""Where blocks come from: the bytes of parts, one after another, uint8. Raises StoreError."""


@dataclass(frozen=True, eq=False)
class _Flight:
    """Cells of a chunk that somebody brings. landed: has brought, or failed to."""

    cells: Numbers
    landed: threading.Event = field(default_factory=threading.Event)


class Tier:
    """A pool over something slower (`below`). Thread-safe.

    width, everywhere: bytes of a row; parts are whole rows and so are slots.
    """

    def __init__(self, name: str, pool: BlockPool):
        self.name, self.pool = name, pool
        self._lock = threading.Lock()
        self._in_flight: dict[Key, list[_Flight]] = {}

    def fetch(self, key: Key, width: int, found: BlockRanges, below: FetchBlocks, seen: TierBytes) -> Tensor:
        """The bytes of the parts, one after another, uint8, on the pool's device, or where `below` brings them when
        there is no room. Raises StoreError."""
        with self.pin(key, width, found, below, seen) as slots:
            if slots is None:
                return below(found)
            data = self.pool.data
            rows = _rows(self.starts(slots), found, width).to(data.device)
            out = torch.empty((len(rows), width), dtype=torch.uint8, device=data.device, pin_memory=data.is_pinned())
            return torch.index_select(data.view(-1, width), 0, rows, out=out).flatten()

    def starts(self, slots: Numbers) -> Numbers:
        """Where slots begin in the pool's bytes."""
        return slots * self.pool.size

    @contextmanager
    def pin(
        self, key: Key, width: int, found: BlockRanges, below: FetchBlocks, seen: TierBytes
    ) -> Iterator[Numbers | None]:
        """The slots of the parts [m], in order, pinned until the block ends; None when there is no room for them.

        Raises StoreError when what is below does not deliver.
        """
        slots = np.full(len(found), -1)
        try:
            missing = np.arange(len(found))
            room = len(found) <= self.pool.slots
            while room and missing.shape[0]:
                room = self._fill(key, width, found, missing, slots, below, seen)
                missing = np.flatnonzero(slots < 0)
            yield slots if room else None
        finally:
            with self._lock:
                self.pool.release(slots[slots >= 0])

    def absent(self, key: Key, found: BlockRanges) -> BlockRanges:
        """Those of the parts that are not here at the moment."""
        with self._lock:
            held = self.pool.holds(key, found.cells)
        return found.some(np.flatnonzero(~held))

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
        found: BlockRanges,
        wanted: Numbers,
        slots: Numbers,
        below: FetchBlocks,
        seen: TierBytes,
    ) -> bool:
        """Find or bring the wanted parts, and wait for those that others bring; what these fail to bring stays -1.
        False: no room."""
        asked = found.some(wanted)
        cells = asked.cells
        with self._lock:
            got = self.pool.find(key, cells)
            slots[wanted] = got
            absent = np.flatnonzero(got < 0)
            seen[self.name] += asked.bytes - int(asked.size[absent].sum())
            if not absent.shape[0]:
                return True
            mine, others = self._apart(key, cells, absent)
            taken = self.pool.take(mine.shape[0])
            if taken is None:
                return False
            flight = _Flight(cells[mine])
            self._in_flight.setdefault(key, []).append(flight)
        try:
            if mine.shape[0]:
                chosen = asked.some(mine)
                self._copy(below(chosen), taken, chosen, width)
        except BaseException:
            with self._lock:
                self.pool.release(taken)
            raise
        else:
            with self._lock:
                self.pool.name(key, flight.cells, taken, found.grid)
            slots[wanted[mine]] = taken
        finally:
            with self._lock:
                self._complete(key, flight)
        for other in others:
            other.landed.wait()
        return True

    def _apart(self, key: Key, cells: Numbers, absent: Numbers) -> tuple[Numbers, list[_Flight]]:
        """(places in `cells` of those absent that nobody brings, who brings the others)."""
        others = []
        for flight in self._in_flight.get(key, ()):
            theirs = np.isin(cells[absent], flight.cells)
            if theirs.any():
                others.append(flight)
                absent = absent[~theirs]
        return absent, others

    def _complete(self, key: Key, flight: _Flight) -> None:
        self._in_flight[key].remove(flight)
        if not self._in_flight[key]:
            del self._in_flight[key]
        flight.landed.set()

    def _copy(self, raw: Tensor, taken: Numbers, found: BlockRanges, width: int) -> None:
        """Bytes of parts, one after another, into their slots."""
        data, rows = self.pool.data.view(-1, width), _rows(self.starts(taken), found, width)
        if data.device.type == "cpu":
            # By numpy: torch would make a second team of OpenMP threads for the thread that fetches ahead. With more
            # of them than processors libgomp's threads sleep where they spun, and every layer of the model waits for
            # them to wake: measured, a fifth of the time to the first token.
            data.numpy()[rows.numpy()] = raw.view(-1, width).numpy()
        else:
            data.index_copy_(0, rows.to(data.device), raw.to(data.device, non_blocking=True).view(-1, width))


def _rows(starts: Numbers, found: BlockRanges, width: int) -> Tensor:
    """The rows of `width` bytes that the parts take up when they begin at `starts` (multiples of it)."""
    counts = found.size // width
    first = starts // width - (counts.cumsum() - counts)
    return torch.from_numpy(np.arange(int(counts.sum())) + first.repeat(counts))
