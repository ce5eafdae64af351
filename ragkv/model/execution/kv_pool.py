"""The KV of requests that are decoded over a pool: blocks in host memory, an index and a bounded pool on the device.

    host     the context cache itself, moved to pinned memory. Answer rows are appended to it block by block
    index    by place, for the requests that decode now: digests, near rows, what the last step read (pool_index.py)
    pool     slots for blocks of any request, layer and kv head (kernels/slots.py)

A request joins before its first step and leaves after its last one. The places and blocks of the index grow when a
request needs more; they never shrink.

The near rows of a layer are its sink blocks and, behind them, the rows of the block that is not full yet. When that
block has become full, the next step copies it to the host, gives it a digest and ranks it with the others. So a step
reads the blocks that `sparse.psa` reads from a cache in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers
from ragkv.kernels.pool import PooledRows, StopRule
from ragkv.kernels.slots import FREE, SlotPool, make_slot_pool
from ragkv.model.execution.pool_index import make_block_index
from ragkv.model.kv_cache import ContextCache
from ragkv.sparse.attention import score_dtype
from ragkv.sparse.blocks import BlockDigests, cuboid
from ragkv.sparse.psa import Psa, first_check
from ragkv.types import Shape

HEADROOM, BLOCKS_STEP = 1.25, 64
"""The index grows to this many times the blocks that are needed, in steps of so many blocks."""
HEADER = 3
"""Rows of a step's inputs before its tables: tokens, positions, and the number of the step."""
TABLES = 7
"""Tables [L, P] of a step's inputs: addresses of near K and V, near rows, addresses of host K and V, ranked blocks, and
blocks before the first check."""


@dataclass(frozen=True)
class PoolUse:
    """Counters of a pool.

    Attributes:
        slots: All slots.
        used: Slots that hold a block.
        size: Bytes of a slot.
        read: Blocks that steps have read. A block is one of one kv head and layer.
        loaded: Blocks that were copied from the host: those that were read from there, and those loaded ahead.
        hits: Blocks that were read from their slots.
        evicted: Blocks that were evicted to make room for others.
    """

    slots: int
    used: int
    size: int
    read: int
    loaded: int
    hits: int
    evicted: int


class KVPool:
    """The pool and the index of one engine. Not thread-safe.

    Attributes:
        shape: the model's shape.
        size: rows of a block.
        rule: the part of the policy that all requests share.
        slots: number of slots.
        pool: the slots.
        index: the index.
        caches: the context cache of each place; None for a free place.
        step: number of steps so far.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, policy: Psa, budget: int):
        """Allocate the slots.

        Args:
            shape: the model's shape.
            dtype: dtype of K and V.
            device: where the model computes.
            policy: supplies what all requests share: block, micro, group, and the largest number of sinks.
            budget: bytes of the slots.

        Raises:
            ValueError: the budget holds no block.
        """
        self.shape, self.dtype, self.device, self.size = shape, dtype, device, policy.block
        self.rule, self._sinks = StopRule(policy.micro, policy.group == "mean"), policy.sinks
        self.slot_bytes = 2 * self.size * shape.head_dim * dtype.itemsize
        self.slots = budget // self.slot_bytes
        if not self.slots:
            raise ValueError(f"{budget} bytes hold no block of {self.slot_bytes} bytes")
        self.index = make_block_index(shape, dtype, device, self._near_capacity, (1, BLOCKS_STEP))
        self.pool = make_slot_pool(self.slots, (self.size, shape.head_dim), self._grid, dtype, device)
        self.caches: list[ContextCache | None] = [None]
        self.step = 0
        self._left = np.zeros(3, dtype=np.int64)
        # [TABLES, L, P]: see TABLES. Then per layer and place the sink rows among the near rows.
        self._tables: NDArray[np.int64] = np.zeros((TABLES, shape.layers, 1), dtype=np.int64)
        self._sink_rows: NDArray[np.int64] = np.zeros((shape.layers, 1), dtype=np.int64)
        self._params: list[Psa | None] = [None]
        self._write_near_addresses()

    @property
    def places(self) -> int:
        """Number of places."""
        return len(self.caches)

    @property
    def joined(self) -> int:
        """Number of requests."""
        return sum(each is not None for each in self.caches)

    @property
    def reserved(self) -> int:
        """Slots that a step of the requests that have joined needs at least."""
        joined = zip(self.caches, self._params, strict=True)
        return sum(
            self.working_set(cache, params) for cache, params in joined if cache is not None and params is not None
        )

    def serves(self, params: Psa) -> bool:
        """Whether requests with this policy can join: they share block, micro, group, bound and layers."""
        same = params.block == self.size and params.bound == "least"
        shared = same and StopRule(params.micro, params.group == "mean") == self.rule
        return shared and not params.dense and params.reach == "kept" and params.sinks <= self._sinks

    def working_set(self, cache: ContextCache, params: Psa) -> int:
        """Return the slots that a step needs at least: the blocks that all kv heads read before their first check."""
        ranked = [max(0, rows // self.size - params.sinks) for rows in cache.lengths]
        needed = [min(total, max(params.micro, math.ceil(first_check(params, total)))) for total in ranked]
        return sum(needed) * self.shape.kv_heads

    @torch.inference_mode()
    def join(self, cache: ContextCache, params: Psa, rows: int) -> int:
        """Index a request and move its cache to host memory.

        Args:
            cache: the context, on the device or in host memory.
            params: its policy; `serves` must hold.
            rows: largest number of rows that will be appended.

        Returns:
            Its place.
        """
        place = self._find_place((max(cache.lengths) + rows) // self.size + 1)
        try:
            cache.make_room(rows)
            self.index.threshold[place] = params.threshold
            for layer in range(self.shape.layers):
                self._index_layer(layer, place, cache, params)
            cache.move([torch.device("cpu")] * self.shape.layers)
            for side in (0, 1):
                addresses = [cache.buffers(layer, 0)[side].data_ptr() for layer in range(self.shape.layers)]
                self._tables[3 + side, :, place] = addresses
        except BaseException:
            self._clear(place)
            raise
        self.caches[place], self._params[place] = cache, params
        return place

    @torch.inference_mode()
    def leave(self, place: int) -> tuple[int, int, int]:
        """Free the place and the slots of a request. Its cache then has all its rows, in host memory.

        Returns:
            Blocks that its steps read, missed, and loaded ahead.
        """
        cache = self.caches[place]
        assert cache is not None
        tails = self._tables[2, :, place] - self._sink_rows[:, place]
        for layer, (rows, tail) in enumerate(zip(cache.lengths, tails.tolist(), strict=True)):
            self._copy_tail(layer, place, cache, slice(rows - tail, rows))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        counts = self.index.counts[place].cpu().numpy().copy()
        self._left += counts
        self._clear(place)
        return tuple(counts.tolist())

    def use(self) -> PoolUse:
        """Return the counters now."""
        read, missed, ahead = (self.index.counts.sum(0).cpu().numpy() + self._left).tolist()
        used = int((self.pool.block_of[:-1] < self.pool.slot_of.shape[0] - 1).sum())
        evicted = int(self.pool.evicted)
        return PoolUse(self.slots, used, self.slot_bytes, read, missed + ahead, read - missed, evicted)

    @torch.inference_mode()
    def begin_step(self, active: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Rank the blocks that have become full, and return the inputs [HEADER + TABLES * L, P] of a step.

        Places that take no part have no ranked blocks in it, so nothing of theirs is read.
        """
        for place in active:
            self._complete_blocks(place)
        self.step += 1
        inputs = np.zeros((HEADER + TABLES * self.shape.layers, self.places), dtype=np.int64)
        inputs[0, active], inputs[1, active], inputs[2] = tokens, positions, self.step
        tables = inputs[HEADER:].reshape(TABLES, self.shape.layers, self.places)
        tables[:5], tables[5:, :, active] = self._tables[:5], self._tables[5:, :, active]
        return torch.from_numpy(inputs)

    def end_step(self, active: Sequence[int], positions: Sequence[int]) -> None:
        """Count the row that a step appended to each request."""
        self._tables[2][:, active] += 1
        for place, position in zip(active, positions, strict=True):
            cache = self.caches[place]
            assert cache is not None
            for layer in range(self.shape.layers):
                cache.reserve(layer, torch.tensor([position]))

    def rows(self, inputs: Tensor) -> PooledRows:
        """Return the requests of a step. The tensors for the references are valid until a request joins or leaves."""
        layers = self.shape.layers
        tables = inputs[HEADER:].view(TABLES, layers, -1)
        k, v = ([list(layer.unbind(0)) for layer in store.unbind(0)] for store in self.index.near)
        host = [
            [
                [None if each is None else each.buffers(layer, 0)[side] for each in self.caches]
                for layer in range(layers)
            ]
            for side in (0, 1)
        ]
        near = CachePointers(tables[:3], k, v)
        index, clock = self.index, inputs[2, :1]
        return PooledRows(near, tables[3:5], tables[5], tables[6], index.threshold, clock, host[0], host[1])

    def near_rows(self, place: int) -> int:
        """Return the near rows of all layers."""
        return int(self._tables[2, :, place].sum())

    @property
    def _near_capacity(self) -> int:
        """Rows of a near buffer. Places that take no part in a step write behind their rows, so there is one more."""
        return (self._sinks + 1) * self.size + 1

    @property
    def _grid(self) -> tuple[int, int, int, int]:
        layers, places, heads, blocks = self.index.digests.shape[:4]
        return layers, places, heads, blocks

    def _find_place(self, blocks: int) -> int:
        """Return a free place with room for so many blocks; the index grows if there is none."""
        free = [place for place, cache in enumerate(self.caches) if cache is None]
        most = self.index.hidden.shape[2]
        if blocks > most:
            most = -(-int(HEADROOM * blocks) // BLOCKS_STEP) * BLOCKS_STEP
        if not free or most > self.index.hidden.shape[2]:
            self._grow(self.places if free else 2 * self.places, most)
        return free[0] if free else len(self.caches) // 2

    @torch.inference_mode(False)
    def _grow(self, width: int, blocks: int) -> None:
        """Copy the index and the map into larger ones. Slots keep their blocks.

        Tensors that are made in inference mode could not be changed outside of it.
        """
        cells, sizes = self.pool.cells, (width, blocks)
        made = make_block_index(self.shape, self.dtype, self.device, self._near_capacity, sizes)
        made.copy_from(self.index)
        self.index = made
        count = math.prod(self._grid)
        slot_of = torch.full((count + 1,), -1, dtype=torch.int32, device=self.device)
        slot_of[:-1].view(self._grid)[:, : cells.shape[1], :, : cells.shape[3]] = cells
        held = (slot_of >= 0).nonzero()[:, 0]
        self.pool.block_of.fill_(count)
        self.pool.block_of[slot_of[held].long()] = held
        pool = self.pool
        self.pool = SlotPool(
            pool.slots, slot_of, pool.block_of, pool.last_used, pool.free, pool.taken, pool.evicted, self._grid
        )
        more = width - self.places
        self.caches += [None] * more
        self._params += [None] * more
        self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, more)))
        self._sink_rows = np.pad(self._sink_rows, ((0, 0), (0, more)))
        self._write_near_addresses()

    def _write_near_addresses(self) -> None:
        for side, store in enumerate(self.index.near):
            self._tables[side] = [[each.data_ptr() for each in layer] for layer in store]

    def _index_layer(self, layer: int, place: int, cache: ContextCache, params: Psa) -> None:
        """Write digests and near rows of one layer."""
        k, v, digests = cache.k(layer), cache.v(layer), BlockDigests(self.size, params.sinks, None)
        digests.update(k, cache.positions(layer))
        tail = len(k) // self.size
        if tail:
            keys = k[: tail * self.size].unflatten(0, (tail, self.size))
            self.index.digests[layer, place, :, :tail] = _boxes(keys)
        hidden = torch.ones(self.index.hidden.shape[2], dtype=torch.bool)
        hidden[:tail] = False
        hidden[digests.sinks.cpu()] = True
        self.index.hidden[layer, place] = hidden.to(self.device)
        sink_rows = len(digests.sinks) * self.size
        for side, x in enumerate((k, v)):
            rows = digests.near_rows(x, tail)
            self.index.near[side, layer, place, : len(rows)] = rows
        self._sink_rows[layer, place] = sink_rows
        self._tables[2, layer, place] = sink_rows + len(k) - tail * self.size
        self._rank(layer, place, tail - len(digests.sinks), params)

    def _rank(self, layer: int, place: int, ranked: int, params: Psa) -> None:
        """Set the number of ranked blocks, and how many of them are read before the first check."""
        self._tables[5:, layer, place] = ranked, math.ceil(first_check(params, ranked))

    def _complete_blocks(self, place: int) -> None:
        """Make a block of the rows at the end of each layer where they fill one."""
        cache, params = self.caches[place], self._params[place]
        assert cache is not None
        assert params is not None
        tails = self._tables[2, :, place] - self._sink_rows[:, place]
        for layer in np.flatnonzero(tails == self.size).tolist():
            start = cache.lengths[layer] - self.size
            self._copy_tail(layer, place, cache, slice(start, start + self.size))
            if self._sink_rows[layer, place] < params.sinks * self.size:  # the context had fewer blocks than sinks
                self._sink_rows[layer, place] += self.size
                continue
            sink_rows, block = int(self._sink_rows[layer, place]), start // self.size
            keys = self.index.near[0, layer, place, sink_rows : sink_rows + self.size]
            self.index.digests[layer, place, :, block : block + 1] = _boxes(keys[None])
            self.index.hidden[layer, place, block] = False
            self._tables[2, layer, place] = sink_rows
            self._rank(layer, place, int(self._tables[5, layer, place]) + 1, params)

    def _copy_tail(self, layer: int, place: int, cache: ContextCache, rows: slice) -> None:
        """Copy near rows behind the sinks to `rows` of the cache."""
        first, count = int(self._sink_rows[layer, place]), rows.stop - rows.start
        for store, near in zip(cache.buffers(layer, 0), self.index.near, strict=True):
            store[rows].copy_(near[layer, place, first : first + count], non_blocking=True)

    def _clear(self, place: int) -> None:
        """Free the slots and the entries of a place."""
        pool, index, cells = self.pool, self.index, self.pool.cells[:, place]
        slots = cells[cells >= 0].long()
        pool.block_of[slots], pool.last_used[slots] = pool.slot_of.shape[0] - 1, FREE
        cells.fill_(-1)
        index.hidden[:, place] = True
        for zeroed in (index.read[:, place], index.ahead[:, place], index.counts[place]):
            zeroed.zero_()
        self._tables[2:, :, place] = 0
        self._sink_rows[:, place] = 0
        self.caches[place], self._params[place] = None, None


def _boxes(keys: Tensor) -> Tensor:
    """Return the digests [Hkv, B, 2d] of keys [B, size, Hkv, d]."""
    return torch.cat(cuboid(keys.to(score_dtype(keys.dtype))), -1).transpose(0, 1)
