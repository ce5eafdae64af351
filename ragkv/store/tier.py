"""One tier: a pool of blocks, what a load finds there, and what it reads from the store below (tiers.py)."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragkv.errors import EntryCorrupt
from ragkv.store.base import KVStore
from ragkv.store.block_pool import BlockPool
from ragkv.store.format.head import Head
from ragkv.store.format.layout import BlockRanges, Numbers, Part, merge_adjacent
from ragkv.store.shared_pool import SharedPool
from ragkv.types import Key

FetchBlocks = Callable[[BlockRanges], Tensor]
"""Fetches block ranges as uint8 bytes, one range after another. Raises StoreError."""


class TierBytes(Counter[str]):
    """Bytes loaded, by the name of the tier that had them: `gpu`, `host` or `store`.

    Attributes:
        layers: [L], the same bytes by layer, for each tier.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, Numbers] = {}

    def add(self, tier: str, layers: Numbers) -> None:
        """Count blocks of a tier: their bytes by layer [L]."""
        self.layers[tier] = self.layers[tier] + layers if tier in self.layers else layers
        self[tier] += int(layers.sum())

    def clear(self) -> None:
        """Count from 0 again."""
        super().clear()
        self.layers.clear()


@dataclass(frozen=True)
class LoadedBlocks:
    """Blocks of one chunk as rows.

    Attributes:
        rows: Per layer (k, v), each [m, Hkv, d], before RoPE.
        tier_bytes: Bytes by the tier that had them. Their sum is the size of the blocks.
    """

    rows: list[tuple[Tensor, Tensor]]
    tier_bytes: TierBytes


@dataclass(frozen=True, eq=False)
class ResidentBlocks:
    """Blocks of one chunk that stay in memory of the model's device until `release` is called.

    Attributes:
        key: The chunk.
        addresses: [L, B]. Address of each block, 0 for those that were not asked for or are not there.
        release: Unpins the blocks. Call it once.
    """

    key: Key
    addresses: Numbers
    release: Callable[[], None]


class Tier:
    """A pool of blocks over a slower source. Thread-safe.

    Block ranges are whole rows of `row_bytes` bytes, and so are the pool's slots.
    """

    def __init__(self, name: str, pool: BlockPool):
        """Create a tier whose name is used in `TierBytes`."""
        self.name, self.pool = name, SharedPool(pool)

    def acquire(
        self, key: Key, row_bytes: int, ranges: BlockRanges, below: FetchBlocks, tier_bytes: TierBytes
    ) -> Numbers | None:
        """Pin blocks in the pool and fetch those that are missing.

        Args:
            key: The chunk.
            row_bytes: Bytes of one row.
            ranges: The blocks.
            below: Fetches missing blocks.
            tier_bytes: The bytes that were in this pool are added here.

        Returns:
            The slots of the blocks [m], in order, pinned until `pool.release`; None when the pool has no room for them.

        Raises:
            StoreError: `below` failed.
        """
        if len(ranges) > self.pool.slots:
            return None
        slots, missing, hits = np.full(len(ranges), -1), np.arange(len(ranges)), np.zeros(ranges.layers, np.int64)
        try:
            while missing.shape[0]:
                requested = ranges.select(missing)
                claim = self.pool.claim(key, requested)
                if claim is None:
                    self.pool.release(slots)
                    return None
                slots[missing] = claim.slots
                hits += requested.select(np.flatnonzero(claim.slots >= 0)).layer_bytes
                if claim.own.shape[0]:
                    fetched = False
                    try:
                        own = requested.select(claim.own)
                        self._copy(below(own), claim.own_slots, own, row_bytes)
                        fetched = True
                    finally:
                        self.pool.land(key, claim, ranges.grid, fetched)
                    slots[missing[claim.own]] = claim.own_slots
                for flight in claim.others:
                    flight.landed.wait()
                # A fetch by another request may have failed. This request then tries itself.
                missing = np.flatnonzero(slots < 0)
        except BaseException:
            self.pool.release(slots)
            raise
        tier_bytes.add(self.name, hits)
        return slots

    def fetch(self, key: Key, row_bytes: int, ranges: BlockRanges, below: FetchBlocks, tier_bytes: TierBytes) -> Tensor:
        """Copy blocks out of the pool, or fetch them from below when the pool has no room. The arguments are those
        of `acquire`.

        Returns:
            The bytes of the blocks, one after another, uint8.

        Raises:
            StoreError: `below` failed.
        """
        slots = self.acquire(key, row_bytes, ranges, below, tier_bytes)
        if slots is None:
            return below(ranges)
        try:
            data = self.pool.data
            rows = row_indices(self.pool.starts(slots), ranges, row_bytes).to(data.device)
            size = (len(rows), row_bytes)
            out = torch.empty(size, dtype=torch.uint8, device=data.device, pin_memory=data.is_pinned())
            return torch.index_select(data.view(-1, row_bytes), 0, rows, out=out).flatten()
        finally:
            self.pool.release(slots)

    def _copy(self, raw: Tensor, slots: Numbers, ranges: BlockRanges, row_bytes: int) -> None:
        """Copy the bytes of blocks, one after another, into their slots."""
        data, rows = self.pool.data.view(-1, row_bytes), row_indices(self.pool.starts(slots), ranges, row_bytes)
        if data.device.type == "cpu":
            # numpy, not torch: torch would start a second team of OpenMP threads for the prefetch thread. When there
            # are more of them than processors, libgomp's threads sleep instead of spinning, and every layer of the
            # model waits for them to wake. Measured: a fifth of the time to the first token.
            data.numpy()[rows.numpy()] = raw.view(-1, row_bytes).numpy()
        else:
            data.index_copy_(0, rows.to(data.device), raw.to(data.device, non_blocking=True).view(-1, row_bytes))


def row_indices(starts: Numbers, ranges: BlockRanges, row_bytes: int) -> Tensor:
    """Return the rows that the block ranges take up when they begin at byte offsets `starts`, multiples of a row."""
    counts = ranges.size // row_bytes
    first = starts // row_bytes - (counts.cumsum() - counts)
    return torch.from_numpy(np.arange(int(counts.sum())) + first.repeat(counts))


def fetch_blocks(store: KVStore, key: Key, head: Head, ranges: BlockRanges) -> Tensor:
    """Read blocks from a store and verify each of them. No other bytes are read.

    Returns:
        The bytes of the blocks, one after another, uint8.

    Raises:
        EntryMissing: The entry, or a part of it, is not in the store.
        EntryCorrupt: A block is damaged.
        StoreUnavailable: The store does not answer.
    """
    raw = torch.empty(ranges.bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy())  # type: ignore[arg-type]  # numpy declares its buffer from Python 3.12 on
    reads = merge_adjacent(ranges)
    tags, (_, blocks, tag_bytes) = memoryview(head.tags.tobytes()), head.tags.shape
    blocks_of = _blocks_by_read(ranges, [read.size for read in reads])

    def verify(number: int) -> None:
        for layer, block, start, size in blocks_of[number]:
            at = (layer * blocks + block) * tag_bytes
            if not hmac.compare_digest(head.seal.block(view[start : start + size]), tags[at : at + tag_bytes]):
                raise EntryCorrupt(f"{key}: layer {layer}, block {block} is damaged")

    if reads:
        store.read(key, reads, view, verify)
    return raw


def fetch_states(store: KVStore, key: Key, head: Head) -> Tensor:
    """Read the states behind a chunk, and verify them.

    Returns:
        Their bytes [layout.state_bytes] uint8.

    Raises:
        EntryMissing: The entry, or a part of it, is not in the store.
        EntryCorrupt: They are damaged.
        StoreUnavailable: The store does not answer.
    """
    raw = torch.empty(head.layout.state_bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy())  # type: ignore[arg-type]  # as in `fetch_blocks`
    store.read(key, [head.layout.state_range], view)
    if not hmac.compare_digest(head.seal.block(view), head.state_tag.tobytes()):
        raise EntryCorrupt(f"{key}: its states are damaged")
    return raw


def _blocks_by_read(ranges: BlockRanges, reads: Sequence[int]) -> list[list[Part]]:
    """Return the blocks that each read covers, as (layer, block, start and size in the output buffer).

    Args:
        ranges: The blocks.
        reads: The size of each read. Adjacent blocks are read at once and verified one by one.
    """
    by_read: list[list[Part]] = [[] for _ in reads]
    number, left, start = -1, 0, 0
    for layer, block, _, size in ranges:
        if left == 0:
            number += 1
            left = reads[number]
        by_read[number].append((layer, block, start, size))
        left -= size
        start += size
    return by_read
