"""Tiers: pools of blocks in memory between the KV store and the model.

    gpu    a pool in device memory
    host   a pool in host memory
    store  disk or Redis; the codec verifies every block that is read from it (format/codec.py)

A block is looked up in this order. It stays in every tier that it passes on its way up.

Each pool is single flight (shared_pool.py): when one request fetches a block, other requests wait for it and do not
fetch it again. So a prefetch and the question that follows it read a block once. A request passes through to the tier
below when the pool is too small for it, or when pinned blocks leave no room.

Parsed and verified head records are cached too, because every question reads the records of all its chunks. When the
model runs on a GPU, their keys are kept there.

A key names a content, so a cached block never becomes stale. `Tiers.drop` removes entries that were deleted or that
turned out to be damaged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ragkv.errors import StoreError
from ragkv.kernels.transfer import PinnedBlocks, TransferFormat
from ragkv.store.base import KVStore
from ragkv.store.block_pool import BlockPool, PoolStats
from ragkv.store.format.codec import fetch_blocks, offsets, unpack
from ragkv.store.format.head import Head
from ragkv.store.format.layout import BlockRanges, Layout, Numbers, block_ranges
from ragkv.store.head_cache import HeadCache
from ragkv.store.shared_pool import SharedPool
from ragkv.types import Key

logger = logging.getLogger(__name__)

HEADS_SHARE = 8
"""One part in `HEADS_SHARE` of the host budget is used for head records."""


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


FetchBlocks = Callable[[BlockRanges], Tensor]
"""Fetches block ranges as uint8 bytes, one range after another. Raises StoreError."""


@dataclass(frozen=True)
class TierBudgets:
    """Memory for cached blocks and head records; 0 caches nothing.

    Attributes:
        host: Bytes of host memory.
        gpu: Bytes of GPU memory. Ignored when the model does not run on a GPU.
    """

    host: int = 0
    gpu: int = 0


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
            rows = _row_indices(self.pool.starts(slots), ranges, row_bytes).to(data.device)
            size = (len(rows), row_bytes)
            out = torch.empty(size, dtype=torch.uint8, device=data.device, pin_memory=data.is_pinned())
            return torch.index_select(data.view(-1, row_bytes), 0, rows, out=out).flatten()
        finally:
            self.pool.release(slots)

    def _copy(self, raw: Tensor, slots: Numbers, ranges: BlockRanges, row_bytes: int) -> None:
        """Copy the bytes of blocks, one after another, into their slots."""
        data, rows = self.pool.data.view(-1, row_bytes), _row_indices(self.pool.starts(slots), ranges, row_bytes)
        if data.device.type == "cpu":
            # numpy, not torch: torch would start a second team of OpenMP threads for the prefetch thread. When there
            # are more of them than processors, libgomp's threads sleep instead of spinning, and every layer of the
            # model waits for them to wake. Measured: a fifth of the time to the first token.
            data.numpy()[rows.numpy()] = raw.view(-1, row_bytes).numpy()
        else:
            data.index_copy_(0, rows.to(data.device), raw.to(data.device, non_blocking=True).view(-1, row_bytes))


class Tiers:
    """A KV store with the memory tiers over it. Thread-safe."""

    def __init__(self, store: KVStore, layout: Layout, budgets: TierBudgets, device: torch.device):
        """Allocate the pools.

        Args:
            store: The KV store below the tiers. It stays open when the tiers are closed.
            layout: The layout of any chunk of the model. It gives the size of a block.
            budgets: Memory for each tier.
            device: The model's device.
        """
        self.store, self._layout, self._device = store, layout, device
        head_bytes = budgets.host // HEADS_SHARE
        self._heads = HeadCache(head_bytes)
        self._tiers = [Tier("host", BlockPool(budgets.host - head_bytes, layout.full_bytes, torch.device("cpu")))]
        if device.type == "cuda":
            self._tiers.append(Tier("gpu", BlockPool(budgets.gpu, layout.full_bytes, device)))
        self._prefetcher: ThreadPoolExecutor | None = None

    def head(self, key: Key, read: Callable[[], Head]) -> tuple[Head, str]:
        """Return the head record of a chunk and the tier that had it.

        Args:
            key: The chunk.
            read: Reads the record from the store and verifies it. What it raises is passed on.
        """
        cached = self._heads.get(key)
        if cached is not None:
            return cached, "host"
        head = self._on_device(read())
        self._heads.put(key, head)
        return head, "store"

    def load(self, key: Key, head: Head, requested: Sequence[Sequence[int]]) -> LoadedBlocks:
        """Load blocks as rows on the model's device.

        Args:
            key: The chunk.
            head: Its head record.
            requested: Per layer the block ids, ascending.

        Raises:
            EntryMissing: The entry is not in the store.
            EntryCorrupt: A block is damaged.
            StoreUnavailable: The store does not answer.
        """
        ranges, tier_bytes, top = block_ranges(head.layout, requested), TierBytes(), self._tiers[-1]
        below = self._fetch_below(self._tiers[:-1], key, head, tier_bytes)
        slots = top.acquire(key, head.layout.row_bytes, ranges, below, tier_bytes)
        if slots is None:
            tier_bytes.clear()
            rows = unpack(below(ranges).to(self._device), offsets(ranges), ranges, head.layout)
        else:
            try:
                rows = unpack(top.pool.data.flatten(), top.pool.starts(slots), ranges, head.layout)
            finally:
                top.pool.release(slots)
        return LoadedBlocks(rows, _with_store_bytes(tier_bytes, ranges))

    def pin(self, key: Key, head: Head, requested: Sequence[Sequence[int]]) -> tuple[PinnedBlocks, TierBytes] | None:
        """Pin blocks in the fastest tier that has room for all of them. Arguments and errors are those of `load`.

        Returns:
            The blocks, pinned until they are released, and their bytes by tier; None when no tier has room.
        """
        ranges = block_ranges(head.layout, requested)
        for level in reversed(range(len(self._tiers))):
            tier, tier_bytes = self._tiers[level], TierBytes()
            below = self._fetch_below(self._tiers[:level], key, head, tier_bytes)
            slots = tier.acquire(key, head.layout.row_bytes, ranges, below, tier_bytes)
            if slots is not None:
                return _pinned(tier, slots, ranges, head.layout), _with_store_bytes(tier_bytes, ranges)
        return None

    def pin_held(
        self, key: Key, head: Head, requested: Sequence[Sequence[int]]
    ) -> tuple[PinnedBlocks, TierBytes] | None:
        """Do what `pin` does if nothing has to be fetched or moved up, else return None. This does not wait."""
        ranges = block_ranges(head.layout, requested)
        tier = next((tier for tier in reversed(self._tiers) if len(ranges) <= tier.pool.slots), None)
        slots = tier.pool.hold(key, ranges) if tier is not None else None
        if tier is None or slots is None:
            return None
        tier_bytes = TierBytes()
        tier_bytes.add(tier.name, ranges.layer_bytes)
        return _pinned(tier, slots, ranges, head.layout), tier_bytes

    def pin_resident(self, key: Key, head: Head, requested: Sequence[Sequence[int]]) -> ResidentBlocks:
        """Pin those of the blocks that are in memory of the model's device now. Nothing is fetched.

        Args:
            key: The chunk.
            head: Its head record.
            requested: Per layer the block ids, ascending.
        """
        ranges, pool, layout = block_ranges(head.layout, requested), self._tiers[-1].pool, head.layout
        slots = pool.find(key, ranges)
        addresses = np.zeros((layout.shape.layers, layout.blocks), dtype=np.int64)
        starts = pool.starts(slots) + pool.data.data_ptr()
        addresses[ranges.layer, ranges.block] = np.where(slots >= 0, starts, 0)
        return ResidentBlocks(key, addresses, partial(pool.release, slots))

    @property
    def resident(self) -> Tensor:
        """The pool in memory of the model's device [slots, bytes], uint8."""
        return self._tiers[-1].pool.data

    @property
    def resident_format(self) -> TransferFormat:
        """Format of the blocks in it."""
        return _transfer_format(self._layout, self._tiers[-1].pool)

    def warm(self, key: Key, head: Head, requested: Sequence[Sequence[int]]) -> None:
        """Fetch blocks into host memory if there is room. Arguments and errors are those of `load`."""
        host, ranges, tier_bytes = self._tiers[0], block_ranges(head.layout, requested), TierBytes()
        below = self._fetch_below((), key, head, tier_bytes)
        slots = host.acquire(key, head.layout.row_bytes, ranges, below, tier_bytes)
        if slots is not None:
            host.pool.release(slots)

    def missing_bytes(self, key: Key, head: Head, requested: Sequence[Sequence[int]]) -> int:
        """Return the bytes of these blocks that are in no memory tier."""
        ranges = block_ranges(head.layout, requested)
        for tier in self._tiers:
            ranges = tier.pool.missing(key, ranges)
        return ranges.bytes

    def prefetch(self, work: Callable[[], None]) -> None:
        """Run `work`, which calls `head` and `warm`, in a background thread. A StoreError is only logged: the request
        that needs the blocks tries again."""
        if self._prefetcher is None:
            self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._prefetcher.submit(_run_and_log, work)

    def drop(self, key: Key) -> None:
        """Remove a chunk whose entry in the store was deleted or is damaged."""
        self._heads.drop(key)
        self.drop_blocks(key)

    def drop_blocks(self, key: Key) -> None:
        """Remove the blocks of a chunk and keep its head record."""
        for tier in self._tiers:
            tier.pool.drop(key)

    def stats(self) -> dict[str, PoolStats]:
        """Return the counters of each pool, by the name of its tier."""
        return {tier.name: tier.pool.stats() for tier in self._tiers}

    def close(self) -> None:
        """Wait for the prefetch that is running. The store stays open, because its owner closes it."""
        if self._prefetcher is not None:
            self._prefetcher.shutdown(cancel_futures=True)

    def _fetch_below(self, tiers: Sequence[Tier], key: Key, head: Head, tier_bytes: TierBytes) -> FetchBlocks:
        """Return a function that fetches blocks through `tiers`, the slowest first."""
        below: FetchBlocks = partial(fetch_blocks, self.store, key, head)
        for tier in tiers:
            below = partial(tier.fetch, key, head.layout.row_bytes, below=below, tier_bytes=tier_bytes)
        return below

    def _on_device(self, head: Head) -> Head:
        """Move the digest's keys to a GPU, because every question multiplies them by its queries."""
        if self._device.type != "cuda":
            return head
        digest = head.digest
        keys = {name: getattr(digest, name).to(self._device) for name in ("mean_keys", "local_query", "retrieval_keys")}
        return replace(head, digest=replace(digest, **keys))


def _pinned(tier: Tier, slots: Numbers, ranges: BlockRanges, layout: Layout) -> PinnedBlocks:
    """Return blocks in slots of a tier that are pinned for their reader; on an error, unpin them."""
    with ExitStack() as pins:
        pins.callback(tier.pool.release, slots)
        starts = tier.pool.starts(slots) + tier.pool.data.data_ptr()
        addresses, layers, ids = map(torch.from_numpy, (starts, ranges.layer, ranges.block))
        return PinnedBlocks(addresses, layers, ids, _transfer_format(layout, tier.pool), pins.pop_all().close)


def _with_store_bytes(tier_bytes: TierBytes, ranges: BlockRanges) -> TierBytes:
    """Count the bytes that no pool had as the store's."""
    tier_bytes.add("store", ranges.layer_bytes - sum(tier_bytes.layers.values()))
    return tier_bytes


def _transfer_format(layout: Layout, pool: SharedPool) -> TransferFormat:
    shape, near = layout.shape, pool.data.is_cuda
    return TransferFormat(layout.body, layout.block, shape.kv_heads, shape.head_dim, layout.dtype, near)


def _row_indices(starts: Numbers, ranges: BlockRanges, row_bytes: int) -> Tensor:
    """Return the rows that the block ranges take up when they begin at byte offsets `starts`, multiples of a row."""
    counts = ranges.size // row_bytes
    first = starts // row_bytes - (counts.cumsum() - counts)
    return torch.from_numpy(np.arange(int(counts.sum())) + first.repeat(counts))


def _run_and_log(work: Callable[[], None]) -> None:
    try:
        work()
    except StoreError as error:
        logger.debug("prefetch: %s", error)
