"""Progressive attention over KV in host memory, with one pool of slots on the device for all requests and layers.

    block   `size` consecutive rows of one kv head in one layer of one request
    host    K and V [rows, Hkv, d] of a request's layer, as a context cache holds them, in pinned memory, so that a GPU
            reads them by address
    slot    memory for one block on the device: K [size, d] then V [size, d]. Any block may be in any slot (PSA,
            section 3.4)
    cell    the number of a block among the blocks of all places, layers and kv heads
    place   the row of a request in the tensors of a step. A place without a request has no blocks
    near    rows that every token reads, always on the device: [capacity, Hkv, d] (`decode_step.CachePointers`)

    rank                   order the blocks of every kv head
    attend_progressively   read near rows, then blocks, best first, until the rule stops. A block without a slot is read
                           from the host and written to the next slot of the free list
    settle                 evict the least recently used blocks and list their slots as free
    load_ahead             give slots to the blocks that a layer read in the last step, before its next attention

One program of a launch reads one kv head of one request. Programs share nothing but the free list, from which each
takes slots by an atomic addition: a launch never evicts, so no block leaves its slot while another program reads it.

The least recently used block is evicted first, as in the paper. Blocks that their layer read in its latest step are not
evicted: with a pool smaller than what a step reads, the least recently used block is the one that is needed next, and
no block would ever be found in its slot. A block that gets no slot is read from the host again.

This is the reference, in torch. The Triton kernels (`triton_pool.py`) have the same names and signatures; `rank` and
`settle` serve both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers
from ragkv.types import Shape

FREE, LISTED = -1, 2**62
"""Values of `SlotPool.last_used`: the slot holds no block; it holds none, and is in the free list."""
LISTED_PART, LEAST_LISTED = 16, 16
"""Length of the free list: this part of all slots, and at least so many if there are."""


@dataclass(frozen=True)
class StopRule:
    """When reading stops, as far as it is the same for all requests; the fields are those of `sparse.psa.Psa`.

    Attributes:
        micro: blocks that are read at a time.
        mean: use the mean coverage of the query heads instead of the lowest.
    """

    micro: int
    mean: bool = False


@dataclass(frozen=True)
class SlotPool:
    """S slots and the map between them and C cells, changed in place.

    The entry behind the last of `slot_of`, `block_of` and `last_used` belongs to nothing: writes that shall have no
    effect go there.

    Attributes:
        slots: [S, 2, size, d].
        slot_of: [C + 1] int32. Slot of a cell; -1 where the block is on the host only.
        block_of: [S + 1] int64. Cell of a slot; C where it holds none.
        last_used: [S + 1] int64. Number of the latest launch that read the slot, or FREE or LISTED.
        free: [F] int64. Slots for the next blocks, in order; S where there is none.
        taken: [1] int32. Entries of `free` that were taken since they were listed. May be larger than F.
        evicted: [1] int64. Blocks that were evicted so far.
        grid: (L, P, Hkv, B), the layers, places, kv heads and blocks that cells are numbered by.
    """

    slots: Tensor
    slot_of: Tensor
    block_of: Tensor
    last_used: Tensor
    free: Tensor
    taken: Tensor
    evicted: Tensor
    grid: tuple[int, int, int, int]

    @property
    def cells(self) -> Tensor:
        """`slot_of` by layer, place, kv head and block: [L, P, Hkv, B] int32, a view."""
        return self.slot_of[:-1].view(self.grid)


@dataclass(frozen=True)
class PooledRows:
    """The requests of a step, by place.

    Attributes:
        near: the near rows.
        host: [2, L, P] int64. Addresses of the first row of K and of V.
        ranked: [L, P] int64. Number of ranked blocks.
        first: [L, P] int64. Ranked blocks that are read before the coverage is checked.
        threshold: [P] float32. Coverage above which reading stops.
        clock: [1] int64. Number of the step, from 1 on and larger than any before; 0 leaves the pool unchanged.
        k: [L][P] tensors [rows, Hkv, d] over the host memory, for the reference, which cannot read addresses. None for
            a place without a request.
        v: likewise.
    """

    near: CachePointers
    host: Tensor
    ranked: Tensor
    first: Tensor
    threshold: Tensor
    clock: Tensor
    k: Sequence[Sequence[Tensor | None]] = ()
    v: Sequence[Sequence[Tensor | None]] = ()


class PoolRead(NamedTuple):
    """Result of progressive attention.

    Attributes:
        out: [P, Hq, d].
        read: [P, Hkv] int32. Number of ranked blocks that were read.
        missed: [P, Hkv] int32. Number of those that were read from the host.
    """

    out: Tensor
    read: Tensor
    missed: Tensor


class PoolKernels(Protocol):
    """The functions of this module that have a Triton twin, or the twins."""

    def attend_progressively(
        self,
        q: Tensor,
        order: Tensor,
        pool: SlotPool,
        rows: PooledRows,
        layer: int,
        shape: Shape,
        rule: StopRule,
        *,
        scale: float,
    ) -> PoolRead:
        """Attend to near rows and to ranked blocks until the rule stops."""
        ...

    def load_ahead(
        self,
        order: Tensor,
        read: Tensor,
        pool: SlotPool,
        rows: PooledRows,
        layer: int,
        loaded: Tensor,
    ) -> None:
        """Give slots to the first `read` blocks of `order` that have none."""
        ...


def make_slot_pool(
    slots: int, block: tuple[int, int], grid: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> SlotPool:
    """Allocate a pool whose slots are all free.

    Args:
        slots: number of slots, at least 1.
        block: rows of a block, and head size.
        grid: as in `SlotPool`.
        dtype: dtype of K and V.
        device: device of the slots.
    """
    cells, size, d = math.prod(grid), *block
    listed = min(slots, max(LEAST_LISTED, slots // LISTED_PART))
    pool = SlotPool(
        torch.zeros(slots, 2, size, d, dtype=dtype, device=device),
        torch.full((cells + 1,), -1, dtype=torch.int32, device=device),
        torch.full((slots + 1,), cells, dtype=torch.int64, device=device),
        torch.full((slots + 1,), FREE, dtype=torch.int64, device=device),
        torch.full((listed,), slots, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        grid,
    )
    settle(pool, torch.ones(1, dtype=torch.int64, device=device), 0)
    return pool


def rank(q: Tensor, digests: Tensor, hidden: Tensor) -> Tensor:
    """Rank blocks by the score of their boxes (`sparse.blocks`). The host does not wait.

    Args:
        q: [P, Hq, d].
        digests: [P, Hkv, B, 2d]. Center, then radius.
        hidden: [P, B] bool. Blocks that are not ranked; they come last.

    Returns:
        Block numbers [P, Hkv, B] int64, best first.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.unflatten(1, (digests.shape[1], -1)).to(wide)
    queries = torch.cat([queries, queries.abs()], dim=-1).mean(2).to(digests.dtype)
    scores = torch.matmul(digests, queries[..., None])[..., 0].masked_fill(hidden[:, None], -math.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices


def settle(pool: SlotPool, clock: Tensor, layer: int) -> None:
    """Fill the free list: with slots that hold no block, then with those of the least recently used blocks.

    Blocks that were read in one of the latest L launches are not evicted. The host does not wait.

    Args:
        pool: the pool. No kernel may be using it.
        clock: [1] int64. Number of the step.
        layer: the layer whose launch was the latest.
    """
    layers, slots, cells = pool.grid[0], pool.slots.shape[0], pool.slot_of.shape[0] - 1
    left = torch.arange(len(pool.free), device=pool.free.device) >= pool.taken
    pool.last_used[torch.where(left, pool.free, slots)] = FREE
    age, oldest = pool.last_used[:-1].topk(len(pool.free), largest=False)
    fits = age <= clock * layers + layer - layers
    chosen = torch.where(fits, oldest, slots)
    pool.evicted.add_((fits & (age != FREE)).sum())
    pool.slot_of[pool.block_of[chosen]] = -1
    pool.block_of[chosen] = cells
    pool.last_used[chosen] = LISTED
    pool.free.copy_(chosen)
    pool.taken.zero_()


def attend_progressively(
    q: Tensor,
    order: Tensor,
    pool: SlotPool,
    rows: PooledRows,
    layer: int,
    shape: Shape,
    rule: StopRule,
    *,
    scale: float,
) -> PoolRead:
    """Attend to all near rows, the new one included, and to blocks, best first, until the rule stops.

    Args:
        q: [P, Hq, d].
        order: [P, Hkv, B] int64. Block numbers, best first.
        pool: the slots. They are updated.
        rows: the requests.
        layer: the layer.
        shape: the model's shape.
        rule: when to stop.
        scale: factor of the scores.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    read, missed = (torch.zeros(q.shape[0], shape.kv_heads, dtype=torch.int32, device=q.device) for _ in range(2))
    for place, length in enumerate(rows.near.table[2, layer].tolist()):
        queries = q[place].to(wide).unflatten(0, (shape.kv_heads, -1))
        near = [store[layer][place][: length + 1].to(wide).transpose(0, 1) for store in (rows.near.k, rows.near.v)]
        for head in range(shape.kv_heads):
            blocks = _HeadBlocks(pool, rows, layer, place, head)
            found = _attend_head(queries[head], near[0][head], near[1][head], order[place, head], blocks, rule, scale)
            group = len(queries[head])
            out[place, head * group : (head + 1) * group], read[place, head], missed[place, head] = found
    return PoolRead(out, read, missed)


def load_ahead(order: Tensor, read: Tensor, pool: SlotPool, rows: PooledRows, layer: int, loaded: Tensor) -> None:
    """Give slots of the free list to the blocks that a layer read in the last step and that have none.

    Args:
        order: [P, Hkv, B] int64. The order of the last step.
        read: [P, Hkv] int32. Blocks that it read.
        pool: the slots. They are updated.
        rows: the requests of the coming step.
        layer: the layer.
        loaded: [P, Hkv] int32. Receives the number of loaded blocks.
    """
    for place, heads in enumerate(read.tolist()):
        for head, count in enumerate(heads):
            blocks = _HeadBlocks(pool, rows, layer, place, head)
            loaded[place, head] = sum(blocks.load(block) for block in order[place, head, :count].tolist())


def _attend_head(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, blocks: _HeadBlocks, rule: StopRule, scale: float
) -> tuple[Tensor, int, int]:
    """Attend with the query heads q [g, d] of one kv head to its near rows k, v [n, d] and its blocks.

    Returns:
        The output [g, d], the number of blocks read and the number of those read from the host.
    """
    scores, values, ranked = [q @ k.T * scale], [v], order[: blocks.ranked].tolist()
    lse, least = scores[0].logsumexp(-1), q.new_full(q.shape[:1], math.inf)
    read = missed = 0
    while read < len(ranked):
        batch = ranked[read : read + rule.micro]
        fetched, from_host = blocks.fetch(batch)
        block_keys, block_values = (fetched[:, side].to(q.dtype) for side in (0, 1))
        score = torch.einsum("gd,bnd->gbn", q, block_keys) * scale
        block_lse = score.logsumexp(-1)
        scores.append(score.flatten(1))
        values.append(block_values.flatten(0, 1))
        lse = torch.logaddexp(lse, block_lse.logsumexp(-1))
        least = torch.minimum(least, block_lse.amin(-1))
        read, missed = read + len(batch), missed + from_host
        coverage = 1 / (1 + (len(ranked) - read) * torch.exp(least - lse))
        share = coverage.mean() if rule.mean else coverage.min()
        if float(share) > blocks.threshold and read >= blocks.first:
            break
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values), read, missed


class _HeadBlocks:
    """The blocks of one kv head of one layer of one request, in one launch."""

    def __init__(self, pool: SlotPool, rows: PooledRows, layer: int, place: int, head: int):
        self._pool, self._rows, self._at = pool, rows, (layer, place, head)
        _, places, heads, blocks = pool.grid
        self._cell = ((layer * places + place) * heads + head) * blocks
        self._launch = int(rows.clock) * pool.grid[0] + layer
        self._changes = int(rows.clock) > 0
        self.ranked, self.first = int(rows.ranked[layer, place]), int(rows.first[layer, place])
        self.threshold = float(rows.threshold[place])

    def fetch(self, blocks: Sequence[int]) -> tuple[Tensor, int]:
        """Read blocks [m, 2, size, d], and admit those without a slot; also return how many were read from the host."""
        pool = self._pool
        slots = [int(pool.slot_of[self._cell + block]) for block in blocks]
        fetched = [
            self._from_host(block) if slot < 0 else pool.slots[slot].clone()
            for block, slot in zip(blocks, slots, strict=True)
        ]
        if self._changes:
            for block, slot, content in zip(blocks, slots, fetched, strict=True):
                if slot >= 0:
                    pool.last_used[slot] = self._launch
                else:
                    self._admit(block, content)
        return torch.stack(fetched), sum(slot < 0 for slot in slots)

    def load(self, block: int) -> bool:
        """Load a block if it has no slot and there is a free one; return whether it was loaded."""
        return int(self._pool.slot_of[self._cell + block]) < 0 and self._admit(block, self._from_host(block))

    def _from_host(self, block: int) -> Tensor:
        """Read a block [2, size, d] from the host."""
        layer, place, head = self._at
        size, device = self._pool.slots.shape[2], self._pool.slots.device
        rows = slice(block * size, (block + 1) * size)
        stores = (self._rows.k[layer][place], self._rows.v[layer][place])
        return torch.stack([store[rows, head] for store in stores if store is not None]).to(device)

    def _admit(self, block: int, content: Tensor) -> bool:
        """Put a block into the next slot of the free list; return False if there is none."""
        pool, at = self._pool, int(self._pool.taken)
        pool.taken.add_(1)
        slot = int(pool.free[at]) if at < len(pool.free) else len(pool.slots)
        if slot == len(pool.slots):
            return False
        pool.slots[slot] = content
        pool.slot_of[self._cell + block] = slot
        pool.block_of[slot], pool.last_used[slot] = self._cell + block, self._launch
        return True
