"""Progressive attention over KV in host memory, with one pool of slots on the device for all requests and layers.

    host    K and V [rows, Hkv, d] of a request's layer, as a context cache holds them, in pinned memory, so that a GPU
            reads them by address
    place   the row of a request in the tensors of a step. A place without a request has no blocks
    near    rows that every token reads, always on the device: [capacity, Hkv, d] (`decode_step.CachePointers`)

    rank                   order the blocks of every kv head
    attend_progressively   read near rows, then blocks, best first, until the rule stops. A block without a slot is read
                           from the host and written to the next slot of the free list
    load_ahead             give slots to the blocks that a layer read in the last step, before its next attention

One program of a launch reads one kv head of one request. Programs share nothing but the free list of the slots
(`slots.py`), from which each takes slots by an atomic addition. A block that gets no slot is read from the host again.

This is the reference, in torch. The Triton kernels (`triton_pool.py`) have the same names and signatures; `rank` serves
both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers
from ragkv.kernels.slots import SlotPool
from ragkv.types import Shape


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
