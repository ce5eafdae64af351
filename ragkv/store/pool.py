"""A pool of blocks: equal-size slots of raw bytes on one device, shared by all layers of all chunks.

One size for everything means that any block can take the place of any other: nothing fragments, and what is kept
follows what is asked for, whichever layer that is in (PSA section 3.4). The least recently used block goes first; a
pinned one stays. Not thread-safe: the tier above holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ragkv.types import Key

Name = tuple[Key, int, int]
"""Chunk, layer, block."""


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
    """`data` [slots, size] uint8; a block smaller than a slot (the last of a chunk) lies at its beginning."""

    def __init__(self, budget: int, size: int, device: torch.device):
        """budget, size: bytes of the pool and of a slot · device: host memory is page-locked where a GPU reads it."""
        self.size = size
        self.slots = budget // size
        pin = device.type == "cpu" and torch.cuda.is_available() and self.slots > 0
        self.data = torch.empty((self.slots, size), dtype=torch.uint8, device=device, pin_memory=pin)
        self._held: OrderedDict[Name, int] = OrderedDict()
        self._names: list[Name | None] = [None] * self.slots
        self._free = list(range(self.slots))
        self._pins = [0] * self.slots
        self._evicted = 0

    def find(self, names: Sequence[Name]) -> list[int | None]:
        """The slot of each block, None where it is not here. Those found are pinned, and count as just used."""
        slots: list[int | None] = []
        for name in names:
            slot = self._held.get(name)
            if slot is not None:
                self._held.move_to_end(name)
                self._pins[slot] += 1
            slots.append(slot)
        return slots

    def holds(self, name: Name) -> bool:
        """Whether the block is here; it does not count as used."""
        return name in self._held

    def take(self, count: int) -> list[int] | None:
        """Slots to fill, pinned and nameless; None, and nothing changed, when pins leave no room for that many."""
        if count > len(self._free):
            self._evict(count - len(self._free))
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._pins[slot] += 1
        return taken

    def name(self, names: Iterable[Name], slots: Iterable[int]) -> None:
        """From now on these blocks are found in these slots."""
        for name, slot in zip(names, slots, strict=True):
            self._held[name] = slot
            self._names[slot] = name

    def release(self, slots: Iterable[int]) -> None:
        """Undo one `find` or `take` of each. A slot that has no name any more, or never got one, is free again."""
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] == 0 and self._names[slot] is None:
                self._free.append(slot)

    def drop(self, key: Key) -> None:
        """Forget a chunk. Slots that are in use are freed by whoever uses them."""
        for name in [name for name in self._held if name[0] == key]:
            self._let_go(name)

    def stats(self) -> PoolStats:
        """Counted now."""
        pinned = sum(pins > 0 for pins in self._pins)
        return PoolStats(self.slots, self.slots - len(self._free), pinned, self.size, self._evicted)

    def _evict(self, count: int) -> None:
        """Free the least recently used blocks that nobody uses, `count` of them if there are so many."""
        gone: list[Name] = []
        for name, slot in self._held.items():
            if len(gone) == count:
                break
            if self._pins[slot] == 0:
                gone.append(name)
        if len(gone) < count:
            return
        for name in gone:
            self._let_go(name)
        self._evicted += count

    def _let_go(self, name: Name) -> None:
        slot = self._held.pop(name)
        self._names[slot] = None
        if self._pins[slot] == 0:
            self._free.append(slot)
