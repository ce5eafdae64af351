"""A block pool that several requests share: one lock, and one fetch for each missing block (single flight).

A request claims blocks. Those that are in the pool are pinned. Those that nobody fetches yet are the request's own: it
fetches them and then lands its claim. Those that another request fetches are waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ragkv.store.block_pool import BlockPool, PoolStats
from ragkv.store.format.layout import BlockRanges, Numbers
from ragkv.types import Key


@dataclass(frozen=True, eq=False)
class Flight:
    """Blocks of a chunk that one request is fetching.

    Attributes:
        cells: The blocks, as in `BlockRanges.cells`.
        landed: Set when the fetch has succeeded or failed.
    """

    cells: Numbers
    landed: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, eq=False)
class Claim:
    """What a request found in a pool, and what it has to fetch.

    Attributes:
        slots: [m], the pinned slot of each block, -1 for blocks that are not in the pool.
        own: Indices of the blocks that this request fetches.
        own_slots: Pinned slots for these blocks.
        flight: Announces this fetch to other requests.
        others: Fetches by other requests that this one waits for.
    """

    slots: Numbers
    own: Numbers
    own_slots: Numbers
    flight: Flight
    others: Sequence[Flight] = ()


class SharedPool:
    """A `BlockPool` with a lock and single flight. Thread-safe."""

    def __init__(self, blocks: BlockPool):
        """Share a pool that nobody else uses."""
        self._blocks = blocks
        self._lock = threading.Lock()
        self._flights: dict[Key, list[Flight]] = {}

    @property
    def data(self) -> Tensor:
        """The pool's memory [slots, size], uint8."""
        return self._blocks.data

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self._blocks.slots

    def starts(self, slots: Numbers) -> Numbers:
        """Return the byte offsets of slots in the pool's memory."""
        return slots * self._blocks.size

    def claim(self, key: Key, ranges: BlockRanges) -> Claim | None:
        """Pin the blocks that are here and take slots for those that nobody fetches yet.

        A claim with `own` blocks must be landed.

        Returns:
            The claim; None, with nothing pinned, when there is no room.
        """
        cells = ranges.cells
        with self._lock:
            slots = self._blocks.find(key, cells)
            own = np.flatnonzero(slots < 0)
            others = []
            for flight in self._flights.get(key, ()) if own.shape[0] else ():
                theirs = np.isin(cells[own], flight.cells)
                if theirs.any():
                    others.append(flight)
                    own = own[~theirs]
            own_slots = self._blocks.take(own.shape[0])
            if own_slots is None:
                self._blocks.release(slots[slots >= 0])
                return None
            claim = Claim(slots, own, own_slots, Flight(cells[own]), others)
            if own.shape[0]:
                self._flights.setdefault(key, []).append(claim.flight)
            return claim

    def find(self, key: Key, ranges: BlockRanges) -> Numbers:
        """Pin those of the blocks that are here now; return the slot of each [m], -1 for the others."""
        with self._lock:
            return self._blocks.find(key, ranges.cells)

    def hold(self, key: Key, ranges: BlockRanges) -> Numbers | None:
        """Pin the blocks if all of them are here now; return the slot of each [m], or None with nothing pinned."""
        with self._lock:
            slots = self._blocks.find(key, ranges.cells)
            if len(ranges) and slots.min() < 0:
                self._blocks.release(slots[slots >= 0])
                return None
            return slots

    def land(self, key: Key, claim: Claim, grid: int, fetched: bool) -> None:
        """End a fetch and wake the requests that wait for it.

        Args:
            key: The chunk.
            claim: A claim with own blocks.
            grid: Cells of the chunk.
            fetched: Whether the own slots now hold their blocks. Otherwise they become free again.
        """
        with self._lock:
            if fetched:
                self._blocks.name(key, claim.flight.cells, claim.own_slots, grid)
            else:
                self._blocks.release(claim.own_slots)
            self._flights[key].remove(claim.flight)
            if not self._flights[key]:
                del self._flights[key]
            claim.flight.landed.set()

    def release(self, slots: Numbers) -> None:
        """Unpin slots. Slots of -1 are ignored."""
        with self._lock:
            self._blocks.release(slots[slots >= 0])

    def missing(self, key: Key, ranges: BlockRanges) -> BlockRanges:
        """Return the blocks that are not in the pool now."""
        with self._lock:
            held = self._blocks.holds(key, ranges.cells)
        return ranges.select(np.flatnonzero(~held))

    def drop(self, key: Key) -> None:
        """Remove the blocks of a chunk."""
        with self._lock:
            self._blocks.drop(key)

    def stats(self) -> PoolStats:
        """Return the pool's counters."""
        with self._lock:
            return self._blocks.stats()
