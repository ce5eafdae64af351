"""A pool of blocks: equal-size slots of raw bytes on one device, shared by all layers of all chunks.

One size for everything means that any block can take the place of any other: nothing fragments, and what is kept
follows what is asked for, whichever layer that is in (PSA section 3.4). The least recently used block goes first; a
pinned one stays. Not thread-safe: the tier above holds the lock.

A question names hundreds of blocks, so all that is known of them is in arrays, by slot, and by cell: the number of a
block among all of its chunk, layer by layer (`Parts.cells`). What is done to some blocks is done to all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.types import Key

Numbers = NDArray[np.int64]

SHARE = 16
"""The oldest blocks are looked for among all, but one part in so many of them at a time."""


@dataclass(frozen=True)
class PoolStats:
    """slots: in all · used: holding a block, or being filled · pinned: in use at this moment · size: bytes of a slot ·
    evicted: blocks that had to make room since the start."""

    slots: int
    used: int
    pinned: int
    size: int
    evicted: int


class BlockPool:
    """`data` [slots, size] uint8; a block smaller than a slot (the last of a chunk) lies at its beginning.

    Cells and slots are arrays [m] int64, and no number is in one twice.
    """

    def __init__(self, budget: int, size: int, device: torch.device):
        """budget, size: bytes of the pool and of a slot · device: host memory is page-locked where a GPU reads it."""
        self.size = size
        self.slots = budget // size
        pin = device.type == "cpu" and torch.cuda.is_available() and self.slots > 0
        self.data = torch.empty((self.slots, size), dtype=torch.uint8, device=device, pin_memory=pin)
        self._where: dict[Key, NDArray[np.int32]] = {}  # by cell: the slot, -1 where the block is not here
        self._keys = np.full(self.slots, None, dtype=object)
        self._cells = np.full(self.slots, -1)  # -1: nameless
        self._pins = np.zeros(self.slots, dtype=np.int64)
        self._used = np.zeros(self.slots, dtype=np.int64)  # when it was; 0: nameless
        self._now = 1
        self._free = np.arange(self.slots)
        self._left = self.slots  # of `_free`, from its beginning
        self._oldest = self._seen = np.empty(0, dtype=np.int64)
        self._evicted = 0

    def find(self, key: Key, cells: Numbers) -> Numbers:
        """The slot of each block of a chunk, -1 where it is not here. Those found are pinned, and count as just used,
        the last one most."""
        where = self._where.get(key)
        if where is None:
            return np.full(cells.shape[0], -1)
        slots = where[cells].astype(np.int64)
        here = slots if slots.shape[0] and slots.min() >= 0 else slots[slots >= 0]
        self._pins[here] += 1
        self._use(here)
        return slots

    def holds(self, key: Key, cells: Numbers) -> NDArray[np.bool_]:
        """Whether each block is here; it does not count as used."""
        where = self._where.get(key)
        return np.zeros(cells.shape[0], dtype=np.bool_) if where is None else where[cells] >= 0

    def take(self, count: int) -> Numbers | None:
        """Slots to fill, pinned and nameless; None, and nothing changed, when pins leave no room for that many."""
        if count > self._left:
            self._evict(count - self._left)
        if count > self._left:
            return None
        self._left -= count
        taken = self._free[self._left : self._left + count].copy()
        self._pins[taken] = 1
        return taken

    def name(self, key: Key, cells: Numbers, slots: Numbers, grid: int) -> None:
        """From now on these blocks are found in these slots. grid: cells of the chunk."""
        if not slots.shape[0]:
            return
        if key not in self._where:
            self._where[key] = np.full(grid, -1, dtype=np.int32)
        self._where[key][cells] = slots
        self._keys[slots] = key
        self._cells[slots] = cells
        self._use(slots)

    def release(self, slots: Numbers) -> None:
        """Undo one `find` or `take` of each. A slot that has no name any more, or never got one, is free again."""
        self._pins[slots] -= 1
        self._regain(slots[self._cells[slots] < 0])

    def drop(self, key: Key) -> None:
        """Forget a chunk. Slots that are in use are freed by whoever uses them."""
        where = self._where.get(key)
        if where is not None:
            self._let_go(where[where >= 0].astype(np.int64))

    def stats(self) -> PoolStats:
        """Counted now."""
        pinned = int(np.count_nonzero(self._pins))
        return PoolStats(self.slots, self.slots - self._left, pinned, self.size, self._evicted)

    def _use(self, slots: Numbers) -> None:
        self._used[slots] = np.arange(self._now, self._now + slots.shape[0])
        self._now += slots.shape[0]

    def _evict(self, count: int) -> None:
        """Free the least recently used blocks that nobody uses, `count` of them if there are so many."""
        gone = self._idle(count)
        if gone.shape[0] < count:
            self._list(count)
            gone = self._idle(count)
        if gone.shape[0] < count:
            return
        self._let_go(gone)
        self._evicted += count

    def _idle(self, count: int) -> Numbers:
        """The first so many that nobody uses of those listed."""
        same = self._used[self._oldest] == self._seen  # the others were used since, or went
        self._oldest, self._seen = self._oldest[same], self._seen[same]
        idle = np.flatnonzero(self._pins[self._oldest] == 0)
        return self._oldest[idle[:count]]

    def _list(self, count: int) -> None:
        """List the oldest blocks, `count` that nobody uses among them if there are so many, and some more for the next
        time: all others were used later. To look through all slots for every few that are needed would cost more than
        bringing what takes their places."""
        named = np.flatnonzero(self._cells >= 0)
        size = count + int(np.count_nonzero(self._pins[named])) + named.shape[0] // SHARE
        used = self._used[named]
        if size < named.shape[0]:
            some = np.argpartition(used, size)[:size]
            named, used = named[some], used[some]
        order = used.argsort()
        self._oldest, self._seen = named[order], used[order]

    def _let_go(self, slots: Numbers) -> None:
        keys, cells = self._keys[slots], self._cells[slots]
        for key in dict.fromkeys(keys.tolist()):
            where = self._where[key]
            where[cells[keys == key]] = -1
            if where.max() < 0:
                del self._where[key]
        self._keys[slots], self._cells[slots], self._used[slots] = None, -1, 0
        self._regain(slots)

    def _regain(self, slots: Numbers) -> None:
        """Those of these nameless slots that nobody uses are free."""
        if slots.shape[0]:
            free = slots[self._pins[slots] == 0]
            self._free[self._left : self._left + free.shape[0]] = free
            self._left += free.shape[0]
