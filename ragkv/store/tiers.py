"""Tiers: pools of blocks in memory between the KV store and the model.

    gpu    a pool in device memory
    host   a pool in host memory
    store  disk or Redis; every block that is read from it is verified (tier.py)

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
from ragkv.store.format.codec import offsets, unpack
from ragkv.store.format.head import Head
from ragkv.store.format.layout import BlockRanges, Layout, Numbers, block_ranges
from ragkv.store.head_cache import HeadCache
from ragkv.store.shared_pool import SharedPool
from ragkv.store.tier import FetchBlocks, LoadedBlocks, ResidentBlocks, Tier, TierBytes, fetch_blocks
from ragkv.types import Key

logger = logging.getLogger(__name__)

HEADS_SHARE = 8
"""One part in `HEADS_SHARE` of the host budget is used for head records."""


@dataclass(frozen=True)
class TierBudgets:
    """Memory for cached blocks and head records; 0 caches nothing.

    Attributes:
        host: Bytes of host memory.
        gpu: Bytes of GPU memory. Ignored when the model does not run on a GPU.
    """

    host: int = 0
    gpu: int = 0


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


def _run_and_log(work: Callable[[], None]) -> None:
    try:
        work()
    except StoreError as error:
        logger.debug("prefetch: %s", error)
