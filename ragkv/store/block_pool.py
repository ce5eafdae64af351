"""A pool of blocks: equal-size slots of raw bytes on one device, shared by all layers of all chunks.

All slots have one size, so any block can replace any other. Nothing fragments, and the pool keeps the blocks that are
used, whatever layer they belong to (PSA section 3.4). The least recently used block is evicted first; pinned blocks are
not evicted. Not thread-safe: `SharedPool` holds the lock.

A question names hundreds of blocks. So the bookkeeping is in arrays, indexed by slot or by cell (the number of a block
among all blocks of its chunk, see `BlockRanges.cells`), and every operation handles many blocks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.types import Key

Numbers = NDArray[np.int64]

SHARE = 16
"""One search for the oldest blocks lists this part of all blocks in advance, for later evictions."""


@dataclass(frozen=True)
class PoolStats:
    """Counters of a pool.

    Attributes:
        slots: All slots.
        used: Slots that hold a block or are being filled.
        pinned: Slots in use now.
        size: Bytes of a slot.
        evicted: Blocks evicted since the start.
    """

    slots: int
    used: int
    pinned: int
    size: int
    evicted: int


class BlockPool:
    """Slots with their blocks, pins and order of use.

    Cells and slots are arrays [m] int64 without duplicates.

    Attributes:
        data: [slots, size] uint8. A block that is smaller than a slot (the last of a chunk) is at the slot's start.
        size: Bytes of a slot.
        slots: The number of slots.
    """

    def __init__(self, budget: int, size: int, device: torch.device):
        """Allocate the pool.

        Args:
            budget: Bytes of the pool.
            size: Bytes of a slot.
            device: Where the pool is. Host memory is page-locked if there is a GPU to read it.
        """
        self.size = size
        self.slots = budget // size
        pin = device.type == "cpu" and torch.cuda.is_available() and self.slots > 0
        self.data = torch.empty((self.slots, size), dtype=torch.uint8, device=device, pin_memory=pin)
        self._slots_of: dict[Key, NDArray[np.int32]] = {}  # by cell: the slot, -1 if the block is not here
        self._keys = np.full(self.slots, None, dtype=object)
        self._cells = np.full(self.slots, -1)  # by slot: the cell, -1 if it holds no named block
        self._pins = np.zeros(self.slots, dtype=np.int64)
        self._used = np.zeros(self.slots, dtype=np.int64)  # by slot: time of the last use, 0 without a named block
        self._now = 1
        self._free = np.arange(self.slots)
        self._left = self.slots  # the first so many of `_free` are free slots
        # Slots in the order of their last use when they were listed, and these times.
        self._oldest = self._oldest_used = np.empty(0, dtype=np.int64)
        self._evicted = 0

    def find(self, key: Key, cells: Numbers) -> Numbers:
        """Find and pin blocks of a chunk. They count as just used, the last one most recently.

        Returns:
            The slot of each block, -1 if it is not here.
        """
        slot_of = self._slots_of.get(key)
        if slot_of is None:
            return np.full(cells.shape[0], -1)
        slots = slot_of[cells].astype(np.int64)
        here = slots if slots.shape[0] and slots.min() >= 0 else slots[slots >= 0]
        self._pins[here] += 1
        self._use(here)
        return slots

    def holds(self, key: Key, cells: Numbers) -> NDArray[np.bool_]:
        """Return whether each block is here, without marking it as used."""
        slot_of = self._slots_of.get(key)
        return np.zeros(cells.shape[0], dtype=np.bool_) if slot_of is None else slot_of[cells] >= 0

    def take(self, count: int) -> Numbers | None:
        """Take slots to fill. They are pinned and unnamed.

        Returns:
            The slots; None, with nothing changed, when pinned blocks leave too little room.
        """
        if count > self._left:
            self._evict(count - self._left)
        if count > self._left:
            return None
        self._left -= count
        slots = self._free[self._left : self._left + count].copy()
        self._pins[slots] = 1
        return slots

    def name(self, key: Key, cells: Numbers, slots: Numbers, grid: int) -> None:
        """Make blocks available in the slots that hold them.

        Args:
            key: The chunk.
            cells: The blocks.
            slots: Their slots.
            grid: Cells of the chunk.
        """
        if not slots.shape[0]:
            return
        if key not in self._slots_of:
            self._slots_of[key] = np.full(grid, -1, dtype=np.int32)
        self._slots_of[key][cells] = slots
        self._keys[slots] = key
        self._cells[slots] = cells
        self._use(slots)

    def release(self, slots: Numbers) -> None:
        """Undo one pin by `find` or `take` of each slot. Unnamed slots without pins become free."""
        self._pins[slots] -= 1
        self._free_unpinned(slots[self._cells[slots] < 0])

    def drop(self, key: Key) -> None:
        """Remove a chunk. Pinned slots become free when they are released."""
        slot_of = self._slots_of.get(key)
        if slot_of is not None:
            self._unname(slot_of[slot_of >= 0].astype(np.int64))

    def stats(self) -> PoolStats:
        """Return the counters now."""
        pinned = int(np.count_nonzero(self._pins))
        return PoolStats(self.slots, self.slots - self._left, pinned, self.size, self._evicted)

    def _use(self, slots: Numbers) -> None:
        self._used[slots] = np.arange(self._now, self._now + slots.shape[0])
        self._now += slots.shape[0]

    def _evict(self, count: int) -> None:
        """Free the `count` least recently used blocks without pins; nothing if there are fewer."""
        victims = self._unpinned_oldest(count)
        if victims.shape[0] < count:
            self._list_oldest(count)
            victims = self._unpinned_oldest(count)
        if victims.shape[0] < count:
            return
        self._unname(victims)
        self._evicted += count

    def _unpinned_oldest(self, count: int) -> Numbers:
        """Return the first `count` listed blocks without pins."""
        same = self._used[self._oldest] == self._oldest_used  # the others were used or removed since
        self._oldest, self._oldest_used = self._oldest[same], self._oldest_used[same]
        idle = np.flatnonzero(self._pins[self._oldest] == 0)
        return self._oldest[idle[:count]]

    def _list_oldest(self, count: int) -> None:
        """List the oldest blocks: `count` without pins, if there are so many, and some more for later evictions.

        All other blocks were used later. A search through all slots for every few victims would cost more than
        fetching the blocks that replace them.
        """
        named = np.flatnonzero(self._cells >= 0)
        size = count + int(np.count_nonzero(self._pins[named])) + named.shape[0] // SHARE
        used = self._used[named]
        if size < named.shape[0]:
            some = np.argpartition(used, size)[:size]
            named, used = named[some], used[some]
        order = used.argsort()
        self._oldest, self._oldest_used = named[order], used[order]

    def _unname(self, slots: Numbers) -> None:
        keys, cells = self._keys[slots], self._cells[slots]
        for key in dict.fromkeys(keys.tolist()):
            slot_of = self._slots_of[key]
            slot_of[cells[keys == key]] = -1
            if slot_of.max() < 0:
                del self._slots_of[key]
        self._keys[slots], self._cells[slots], self._used[slots] = None, -1, 0
        self._free_unpinned(slots)

    def _free_unpinned(self, slots: Numbers) -> None:
        """Make those of these unnamed slots free that have no pins."""
        if slots.shape[0]:
            free = slots[self._pins[slots] == 0]
            self._free[self._left : self._left + free.shape[0]] = free
            self._left += free.shape[0]
