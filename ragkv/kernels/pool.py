"""Progressive attention over KV in host memory with a pool of slots on the device, for W requests with one token each.

    block      `size` consecutive rows of one kv head: K [size, d] then V [size, d], contiguous
    host       all full blocks of a request's context, in pinned memory, so that a GPU reads them by address
    slot       memory for one block on the device
    partition  the slots of one kv head of one layer of one request, with a map from blocks to slots
    near       rows that every token reads, always on the device: [capacity, Hkv, d] (`decode_step.CachePointers`)

A program reads the ranked blocks of one kv head of one request (`rank`), `micro` at a time, and stops by coverage, as
`sparse.psa.progress` does. A block without a slot is read directly from the host. It takes the least recently used
slot, unless that slot was read in the same step.

The slots are partitioned, instead of one least-recently-used pool for all, because one program then owns each
partition. Nothing is atomic and nothing waits, and the blocks that are read and kept do not depend on other requests or
on the order of programs. The disadvantage is that heads that need few blocks cannot give slots to heads that need many.

This is the reference, in torch. The Triton kernel (`triton_pool.py`) has the same name and signature.
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


@dataclass(frozen=True)
class StopRule:
    """When reading stops; the fields are those of `sparse.psa.Psa`.

    Attributes:
        threshold: coverage above which reading stops.
        micro: blocks that are read at a time.
        least: number of blocks that are read in any case.
        mean: use the mean coverage of the query heads instead of the lowest.
        part: share of the ranked blocks that is read in any case.
    """

    threshold: float
    micro: int
    least: int = 0
    mean: bool = False
    part: float = 0.0


@dataclass(frozen=True)
class SlotPool:
    """Blocks of W requests in L layers, with S slots a partition and at most B blocks a request. Changed in place.

    Attributes:
        host: [L, W, 2] int64. Address of the first block, and bytes of one kv head's blocks.
        ranked: [L, W] int32. Number of ranked blocks.
        slots: [L, W, Hkv, S, 2, size, d].
        slot_of: [L, W, Hkv, B] int32. Slot of a block; -1 where it is on the host only.
        block_of: [L, W, Hkv, S] int32. Block of a slot; -1 where it is free.
        last_used: [L, W, Hkv, S] int32. The last step that read the slot.
        blocks: [L][W] tensors [Hkv, B, 2, size, d] over the host memory, for the reference, which cannot read
            addresses.
    """

    host: Tensor
    ranked: Tensor
    slots: Tensor
    slot_of: Tensor
    block_of: Tensor
    last_used: Tensor
    blocks: Sequence[Sequence[Tensor]] = ()


class PoolRead(NamedTuple):
    """Result of progressive attention.

    Attributes:
        out: [W, Hq, d].
        read: [W, Hkv] int32. Number of ranked blocks that were read.
        missed: [W, Hkv] int32. Number of those that were read from the host.
    """

    out: Tensor
    read: Tensor
    missed: Tensor


class ProgressiveKernel(Protocol):
    """`attend_progressively` of this module, or the Triton kernel with the same signature."""

    def __call__(
        self,
        q: Tensor,
        order: Tensor,
        pool: SlotPool,
        near: CachePointers,
        layer: int,
        shape: Shape,
        rule: StopRule,
        clock: Tensor,
        *,
        scale: float,
    ) -> PoolRead:
        """Attend to near rows and to ranked blocks until the rule stops."""
        ...


def rank(q: Tensor, digests: Tensor, hidden: Tensor) -> Tensor:
    """Rank blocks by the score of their boxes (`sparse.blocks`). The host does not wait.

    Args:
        q: [W, Hq, d].
        digests: [W, Hkv, B, 2d]. Center, then radius.
        hidden: [W, B] bool. Blocks that are not ranked; they come last.

    Returns:
        Block numbers [W, Hkv, B] int64, best first.
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
    near: CachePointers,
    layer: int,
    shape: Shape,
    rule: StopRule,
    clock: Tensor,
    *,
    scale: float,
) -> PoolRead:
    """Attend to all near rows, the new one included, and to blocks, best first, until the rule stops.

    Args:
        q: [W, Hq, d].
        order: [W, Hkv, B] int64. Block numbers, best first.
        pool: the blocks. The slots are updated.
        near: the near rows.
        layer: the layer.
        shape: the model's shape.
        rule: when to stop.
        clock: [1] int64. Number of the step, from 1 on and larger than any before; 0 leaves the pool unchanged.
        scale: factor of the scores.
    """
    wide, now = torch.promote_types(q.dtype, torch.float32), int(clock[0])
    out = torch.empty_like(q)
    read, missed = (torch.zeros(q.shape[0], shape.kv_heads, dtype=torch.int32, device=q.device) for _ in range(2))
    for i, length in enumerate(near.table[2, layer].tolist()):
        queries = q[i].to(wide).unflatten(0, (shape.kv_heads, -1))
        rows = (store[layer][i][: length + 1].to(wide) for store in (near.k, near.v))
        k, v = (each.transpose(0, 1) for each in rows)
        heads = [
            _attend_head(
                queries[head], k[head], v[head], order[i, head], _Partition(pool, layer, i, head, now), rule, scale
            )
            for head in range(shape.kv_heads)
        ]
        out[i] = torch.cat([head_out for head_out, _, _ in heads])
        for head, (_, blocks_read, blocks_missed) in enumerate(heads):
            read[i, head], missed[i, head] = blocks_read, blocks_missed
    return PoolRead(out, read, missed)


def _attend_head(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, partition: _Partition, rule: StopRule, scale: float
) -> tuple[Tensor, int, int]:
    """Attend with the query heads q [g, d] of one kv head to its near rows k, v [n, d] and its blocks.

    Returns:
        The output [g, d], the number of blocks read and the number of those read from the host.
    """
    scores, values, blocks = [q @ k.T * scale], [v], order[: partition.ranked].tolist()
    lse, least = scores[0].logsumexp(-1), q.new_full(q.shape[:1], math.inf)
    read = missed = 0
    while read < len(blocks):
        batch = blocks[read : read + rule.micro]
        fetched, from_host = partition.fetch(batch)
        block_keys, block_values = (fetched[:, side].to(q.dtype) for side in (0, 1))
        score = torch.einsum("gd,bnd->gbn", q, block_keys) * scale
        block_lse = score.logsumexp(-1)
        scores.append(score.flatten(1))
        values.append(block_values.flatten(0, 1))
        lse = torch.logaddexp(lse, block_lse.logsumexp(-1))
        least = torch.minimum(least, block_lse.amin(-1))
        read, missed = read + len(batch), missed + from_host
        coverage = 1 / (1 + (len(blocks) - read) * torch.exp(least - lse))
        share = float(coverage.mean() if rule.mean else coverage.min())
        if share > rule.threshold and read >= max(rule.least, rule.part * len(blocks)):
            break
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values), read, missed


class _Partition:
    """The slots of one kv head of one layer of one request, in one step."""

    def __init__(self, pool: SlotPool, layer: int, request: int, head: int, now: int):
        at = layer, request, head
        self._slots, self._slot_of, self._block_of, self._last_used = (
            each[at] for each in (pool.slots, pool.slot_of, pool.block_of, pool.last_used)
        )
        self._host, self._now, self.ranked = pool.blocks[layer][request][head], now, int(pool.ranked[layer, request])

    def fetch(self, blocks: Sequence[int]) -> tuple[Tensor, int]:
        """Read blocks, and admit those without a slot where a slot is free or can be replaced.

        Returns:
            The blocks [m, 2, size, d] and the number of them that were read from the host.
        """
        slots = [int(self._slot_of[block]) for block in blocks]
        fetched = torch.stack(
            [
                self._host[block].to(self._slots.device) if slot < 0 else self._slots[slot]
                for block, slot in zip(blocks, slots, strict=True)
            ]
        )
        for slot in slots:  # before any admission, so that no block takes the slot of another block of this call
            if slot >= 0:
                self._last_used[slot] = max(int(self._last_used[slot]), self._now)
        absent = [i for i, slot in enumerate(slots) if slot < 0]
        for i in absent:
            self._admit(blocks[i], fetched[i])
        return fetched, len(absent)

    def _admit(self, block: int, content: Tensor) -> None:
        if not self._last_used.numel() or int(self._last_used.min()) >= self._now:
            return
        slot = int(self._last_used.argmin())
        old = int(self._block_of[slot])
        if old >= 0:
            self._slot_of[old] = -1
        self._slot_of[block], self._block_of[slot], self._last_used[slot] = slot, block, self._now
        self._slots[slot] = content
