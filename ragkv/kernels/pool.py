"""Progressive reading of KV that lies in host memory, some of it in a pool on the device: W requests, a token each.

    block      `size` consecutive rows of one kv head, K [size, d] then V [size, d], contiguous
    host       all full blocks of a request's context, pinned, so that a GPU reads them by address
    slot       room for one block on the device
    partition  the slots of one kv head of one layer of one request, with a map from blocks to slots
    near       rows that every token reads: on the device always, rows [capacity, Hkv, d] (`steps.Places`)

A program walks the ranked blocks of one kv head of one request (`rank`), `micro` at a time, and stops by coverage, as
`sparse.psa.progress` does. A block that has no slot is read straight from the host, and takes the slot that was read
the longest ago, unless that was read in this step, too.

Why partitions, and not one least-recently-used pool for all: one program owns a partition, so nothing is atomic,
nothing waits, and which blocks are read and kept does not depend on what other requests do or which program was first.
The price is that heads which need few blocks lend no slots to those which need many.

This is the reference, in torch; its Triton twin (`triton_pool.py`) has the same names and signatures.
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
    """When reading stops; fields as in `sparse.psa.Psa`. mean: of the query heads' coverage, else the least of them."""

    threshold: float
    micro: int
    least: int = 0
    mean: bool = False
    part: float = 0.0


@dataclass(frozen=True)
class SlotPool:
    """Blocks of W requests in L layers, S slots a partition, at most B blocks a request; changed in place.

    host [L, W, 2] int64: address of the first block, bytes of one kv head's blocks · ranked [L, W] int32: blocks that
    are ranked · slots [L, W, Hkv, S, 2, size, d] · place [L, W, Hkv, B] int32: slot of a block, -1: on the host only
    · owner [L, W, Hkv, S] int32: block of a slot, -1: none · used [L, W, Hkv, S] int32: the step that read the slot
    last · blocks [L][W]: the same host memory as tensors [Hkv, B, 2, size, d], for the reference, which cannot read
    addresses
    """

    host: Tensor
    ranked: Tensor
    slots: Tensor
    place: Tensor
    owner: Tensor
    used: Tensor
    blocks: Sequence[Sequence[Tensor]] = ()


class PoolRead(NamedTuple):
    """out [W, Hq, d] · read [W, Hkv] int32: ranked blocks that were read · missed [W, Hkv] int32: those of them that
    came from the host."""

    out: Tensor
    read: Tensor
    missed: Tensor


class ProgressiveKernel(Protocol):
    """`progress` of this module, or its twin."""

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
        """Attention of a token to near rows, and to ranked blocks as far as the rule wants them."""
        ...


def rank(q: Tensor, digests: Tensor, hidden: Tensor) -> Tensor:
    """Blocks [W, Hkv, B] int64, best first, by the score of their boxes (`sparse.blocks`): q [W, Hq, d], digests [W,
    Hkv, B, 2d], center then radius. hidden, bool [W, B]: not ranked, they come last. Waits for nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    asked = q.unflatten(1, (digests.shape[1], -1)).to(wide)
    asked = torch.cat([asked, asked.abs()], dim=-1).mean(2).to(digests.dtype)
    scores = torch.matmul(digests, asked[..., None])[..., 0].masked_fill(hidden[:, None], -math.inf)
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
    """Attention of q [W, Hq, d] to all near rows, the new one included, and to the blocks of order [W, Hkv, B], best
    first, until the rule is met. clock [1] int64: number of the step, from 1 on, larger than any before; 0 changes
    nothing in the pool."""
    wide, now = torch.promote_types(q.dtype, torch.float32), int(clock[0])
    out = torch.empty_like(q)
    read, missed = (torch.zeros(q.shape[0], shape.kv_heads, dtype=torch.int32, device=q.device) for _ in range(2))
    for of, held in enumerate(near.table[2, layer].tolist()):
        asked = q[of].to(wide).unflatten(0, (shape.kv_heads, -1))
        rows = (store[layer][of][: held + 1].to(wide) for store in (near.k, near.v))
        k, v = (each.transpose(0, 1) for each in rows)
        heads = [
            _read(asked[head], k[head], v[head], order[of, head], _Partition(pool, layer, of, head, now), rule, scale)
            for head in range(shape.kv_heads)
        ]
        out[of] = torch.cat([each for each, _, _ in heads])
        for head, (_, some, lacked) in enumerate(heads):
            read[of, head], missed[of, head] = some, lacked
    return PoolRead(out, read, missed)


def _read(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, partition: _Partition, rule: StopRule, scale: float
) -> tuple[Tensor, int, int]:
    """(out [g, d], blocks read, blocks missed) of q [g, d], near rows k, v [n, d] and one kv head's order [B]."""
    scores, values, blocks = [q @ k.T * scale], [v], order[: partition.ranked].tolist()
    lse, least = scores[0].logsumexp(-1), q.new_full(q.shape[:1], math.inf)
    read = missed = 0
    while read < len(blocks):
        some = blocks[read : read + rule.micro]
        found, lacked = partition.fetch(some)
        keys, news = (found[:, side].to(q.dtype) for side in (0, 1))
        score = torch.einsum("gd,bnd->gbn", q, keys) * scale
        each = score.logsumexp(-1)
        scores.append(score.flatten(1))
        values.append(news.flatten(0, 1))
        lse = torch.logaddexp(lse, each.logsumexp(-1))
        least = torch.minimum(least, each.amin(-1))
        read, missed = read + len(some), missed + lacked
        claimed = 1 / (1 + (len(blocks) - read) * torch.exp(least - lse))
        share = float(claimed.mean() if rule.mean else claimed.min())
        if share > rule.threshold and read >= max(rule.least, rule.part * len(blocks)):
            break
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values), read, missed


class _Partition:
    """The slots of one kv head of one layer of one request, in one step."""

    def __init__(self, pool: SlotPool, layer: int, of: int, head: int, now: int):
        at = layer, of, head
        self._slots, self._place, self._owner, self._used = (
            each[at] for each in (pool.slots, pool.place, pool.owner, pool.used)
        )
        self._host, self._now, self.ranked = pool.blocks[layer][of][head], now, int(pool.ranked[layer, of])

    def fetch(self, blocks: Sequence[int]) -> tuple[Tensor, int]:
        """(blocks [m, 2, size, d], how many came from the host); those have slots now, if there were any to take."""
        slots = [int(self._place[block]) for block in blocks]
        found = torch.stack(
            [
                self._host[block].to(self._slots.device) if slot < 0 else self._slots[slot]
                for block, slot in zip(blocks, slots, strict=True)
            ]
        )
        for slot in slots:  # first of all, so that no block takes the slot of one that is read beside it
            if slot >= 0:
                self._used[slot] = max(int(self._used[slot]), self._now)
        lacking = [i for i, slot in enumerate(slots) if slot < 0]
        for i in lacking:
            self._admit(blocks[i], found[i])
        return found, len(lacking)

    def _admit(self, block: int, content: Tensor) -> None:
        if not self._used.numel() or int(self._used.min()) >= self._now:
            return
        slot = int(self._used.argmin())
        old = int(self._owner[slot])
        if old >= 0:
            self._place[old] = -1
        self._place[block], self._owner[slot], self._used[slot] = slot, block, self._now
        self._slots[slot] = content
