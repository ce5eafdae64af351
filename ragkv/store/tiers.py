"""Tiers: stored blocks on their way to the model, and what is kept of them on the way.

    gpu    a pool on the device      ┐ a block is looked up in this order, and stays
    host   a pool in host memory     ┘ where it came through
    store  disk or Redis; every block is verified when it leaves it (codec.py)

Head records that were asked for are kept, too, parsed and verified: every question reads those of all its chunks. Where
the model is on a GPU, their keys lie there.
What is kept was right when it came and never changes, since a key names a content; `drop` is for entries that are
deleted, or that turn out to be damaged.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from ragkv.errors import StoreError
from ragkv.kernels.transfer import PinnedBlocks, TransferFormat
from ragkv.store.base import KVStore
from ragkv.store.block_pool import BlockPool, PoolStats
from ragkv.store.format.codec import Head, fetch, offsets, unpack
from ragkv.store.format.layout import BlockRanges, Layout, block_ranges
from ragkv.store.tier import FetchBlocks, Tier, TierBytes
from ragkv.types import Key

logger = logging.getLogger(__name__)

HEADS_SHARE = 8
"""One part in so many of the host budget is for head records."""


@dataclass(frozen=True)
class TierBudgets:
    """Bytes of host memory and of GPU memory for what stays between questions; 0 keeps nothing there. The GPU's counts
    only where the model is on one."""

    host: int = 0
    gpu: int = 0


@dataclass(frozen=True)
class LoadedBlocks:
    """rows: per layer (k, v) [m, Hkv, d], before RoPE · seen: bytes by the tier that gave them."""

    rows: list[tuple[Tensor, Tensor]]
    seen: TierBytes


class Tiers:
    """A KV store with what is kept of it in memory. Thread-safe."""

    def __init__(self, store: KVStore, layout: Layout, budgets: TierBudgets, device: torch.device):
        """layout: of any chunk of the model, for the size of a block · device: where the model is."""
        self.store, self._device = store, device
        heads = budgets.host // HEADS_SHARE
        self._heads = _Heads(heads)
        self._tiers = [Tier("host", BlockPool(budgets.host - heads, layout.full_bytes, torch.device("cpu")))]
        if device.type == "cuda":
            self._tiers.append(Tier("gpu", BlockPool(budgets.gpu, layout.full_bytes, device)))
        self._ahead: ThreadPoolExecutor | None = None

    def head(self, key: Key, read: Callable[[], Head]) -> tuple[Head, str]:
        """(the head record of a chunk, the tier that had it). read: from the store, verified; raises StoreError."""
        kept = self._heads.get(key)
        if kept is not None:
            return kept, "host"
        head = self._near(read())
        self._heads.put(key, head)
        return head, "store"

    def _near(self, head: Head) -> Head:
        """The same with what is multiplied by a question's queries where these are: every question reads it."""
        if self._device.type != "cuda":
            return head
        digest = head.digest
        keys = {name: getattr(digest, name).to(self._device) for name in ("mean_keys", "local_query", "retrieval_keys")}
        return replace(head, digest=replace(digest, **keys))

    def load(self, key: Key, head: Head, wanted: Sequence[Sequence[int]]) -> LoadedBlocks:
        """Blocks, block ids per layer ascending. Raises EntryMissing, EntryCorrupt, StoreUnavailable."""
        found, seen = block_ranges(head.layout, wanted), TierBytes()
        *lower, top = self._tiers
        below = self._below(lower, key, head, seen)
        with top.pin(key, head.layout.row_bytes, found, below, seen) as slots:
            if slots is not None:
                return LoadedBlocks(unpack(top.pool.data.flatten(), top.starts(slots), found, head.layout), seen)
        return LoadedBlocks(unpack(below(found).to(self._device), offsets(found), found, head.layout), seen)

    def pin(self, key: Key, head: Head, wanted: Sequence[Sequence[int]]) -> tuple[PinnedBlocks, TierBytes] | None:
        """Blocks where they lie in the nearest tier that has room for all of them, and bytes by the tier that gave
        them; None where no tier has. They are pinned until they are released. Raises as `load`."""
        found, layout = block_ranges(head.layout, wanted), head.layout
        shape = layout.shape
        for above in range(len(self._tiers) - 1, -1, -1):
            tier, seen = self._tiers[above], TierBytes()
            below = self._below(self._tiers[:above], key, head, seen)
            with ExitStack() as held:
                slots = held.enter_context(tier.pin(key, layout.row_bytes, found, below, seen))
                if slots is not None:
                    addresses = tier.starts(slots) + tier.pool.data.data_ptr()
                    told = addresses, found.layer, found.block
                    numbers, layers, blocks = (torch.from_numpy(each) for each in told)
                    near = tier.pool.data.is_cuda
                    form = TransferFormat(layout.body, layout.block, shape.kv_heads, shape.head_dim, layout.dtype, near)
                    return PinnedBlocks(numbers, layers, blocks, form, held.pop_all().close), seen
        return None

    def warm(self, key: Key, head: Head, wanted: Sequence[Sequence[int]]) -> None:
        """Bring blocks into host memory, as far as there is room. Raises as `load`."""
        host, found, seen = self._tiers[0], block_ranges(head.layout, wanted), TierBytes()
        if len(found) <= host.pool.slots:
            with host.pin(key, head.layout.row_bytes, found, partial(self._stored, key, head, seen), seen):
                pass

    def _below(self, tiers: Sequence[Tier], key: Key, head: Head, seen: TierBytes) -> FetchBlocks:
        """What brings blocks through `tiers`, the farthest first."""
        below: FetchBlocks = partial(self._stored, key, head, seen)
        for tier in tiers:
            below = partial(tier.fetch, key, head.layout.row_bytes, below=below, seen=seen)
        return below

    def _stored(self, key: Key, head: Head, seen: TierBytes, found: BlockRanges) -> Tensor:
        raw = fetch(self.store, key, head, found)
        seen["store"] += raw.numel()
        return raw

    def absent(self, key: Key, head: Head, wanted: Sequence[Sequence[int]]) -> int:
        """Bytes of these blocks that only the store has."""
        found = block_ranges(head.layout, wanted)
        for tier in self._tiers:
            found = tier.absent(key, found)
        return found.bytes

    def prefetch(self, work: Callable[[], None]) -> None:
        """Do `work` (calls of `head` and `warm`) soon, in a thread of its own. What fails is tried again by whoever
        needs it."""
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead.submit(_quietly, work)

    def drop(self, key: Key) -> None:
        """Forget a chunk, whose entry in the store is deleted or damaged."""
        self._heads.drop(key)
        self.cool(key)

    def cool(self, key: Key) -> None:
        """Forget the blocks of a chunk, but not its head record: who asks next reads them from the store."""
        for tier in self._tiers:
            tier.drop(key)

    def stats(self) -> dict[str, PoolStats]:
        """By tier."""
        return {tier.name: tier.stats() for tier in self._tiers}

    def close(self) -> None:
        """Wait for what is being prefetched. The store stays open: it is its owner's to close."""
        if self._ahead is not None:
            self._ahead.shutdown(cancel_futures=True)


class _Heads:
    """Head records, the least recently used go first."""

    def __init__(self, budget: int):
        self._budget, self._bytes = budget, 0
        self._held: OrderedDict[Key, Head] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Head | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: Key, head: Head) -> None:
        with self._lock:
            self._drop(key)
            self._held[key] = head
            self._bytes += _size(head)
            while self._bytes > self._budget:
                self._drop(next(iter(self._held)))

    def drop(self, key: Key) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        head = self._held.pop(key, None)
        if head is not None:
            self._bytes -= _size(head)


def _size(head: Head) -> int:
    """Bytes of a head record in memory; its digest is larger there than in the store."""
    digest: list[Tensor] = [getattr(head.digest, field.name) for field in fields(head.digest)]
    return sum(tensor.numel() * tensor.itemsize for tensor in digest) + head.tags.nbytes + 32 * len(head.tokens)


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except StoreError as error:
        logger.debug("prefetch: %s", error)
