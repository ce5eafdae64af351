"""CritiPrefill: neighbouring queries need the same keys, so keys are chosen for a whole segment of queries at once.

Paper: CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs
(arXiv 2409.12490), algorithms 1 and 2.

    Qmax, Qmin [S, Hq, d]    elementwise extremes of the queries of a segment
    Kmax, Kmin [B, Hkv, d]   elementwise extremes of the keys of a block
    raw [Hkv, S, B]          how critical a block is for a segment, by its extremes
    score [Hkv, S, B]        the same as shares of what the segment may see, fused with the layer before

Every segment reads its own tokens and, of the blocks wholly before it, the `budget` tokens with the best score. Dense
stay: the first layers, segments that start early, and the input's last segment.

Differs from the paper: causality is applied before the one softmax, not after four (softmax over blocks of the future
lets them change the scores of the past); the current layer weighs `fusion`, the paper's text says the opposite; the
segment's own tokens come on top of the budget; query heads of a group are averaged. Segments are counted from position
0 and blocks by cache rows, so reading an input in pieces, or a turn behind a cached conversation, makes the same
choices as reading it at once, as long as pieces end where segments do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.kernels.block_index import BlockSparseIndex, build_index, clear_blocks, extremes
from ragkv.sparse.base import wide


@dataclass(frozen=True)
class CritiPrefill:
    """segment: queries that share their keys · block: keys chosen together · budget: tokens chosen for a segment beside
    its own (paper: 1024, silent on whether its own are among them) · fusion: weight of the current layer (paper silent
    between its text, .25, and its order of terms) · skip: layers that stay dense (paper silent) · threshold: segments
    that start before this position stay dense, and so do inputs that end before it (paper silent)."""

    segment: int = 512
    block: int = 32
    budget: int = 1024
    fusion: float = 0.75
    skip: int = 1
    threshold: int = 4096

    def __post_init__(self) -> None:
        if not (self.block >= 1 and self.segment >= 1 and self.budget >= self.block):
            raise ValueError("block and segment must be at least 1, budget at least a block")
        if not (0 <= self.fusion <= 1 and self.skip >= 0 and self.threshold >= 0):
            raise ValueError("fusion must be between 0 and 1, skip and threshold not negative")

    def applies(self, tokens: int) -> bool:
        """Inputs of two segments and more, above the threshold."""
        return tokens > max(self.threshold, 2 * self.segment)

    def start(self) -> Criticality:
        """State of one request."""
        return Criticality(self)


@dataclass(frozen=True)
class BlockGrid:
    """Segments of queries and blocks of keys at given positions. offset: rows that the first segment lacks · allowed
    [S, B] bool: blocks wholly before a segment, its candidates · own [S, B]: blocks that are not, but seen by it ·
    dense [S, 1]: segments that read all of them · clear [S, B]: see `make_lists`."""

    q_pos: Tensor
    k_pos: Tensor
    offset: int
    allowed: Tensor
    own: Tensor
    dense: Tensor
    clear: Tensor

    def to(self, device: torch.device) -> BlockGrid:
        """The same for rows on another device; positions stay on the CPU."""
        if self.allowed.device == device:
            return self
        parts = (each.to(device) for each in (self.allowed, self.own, self.dense, self.clear))
        return BlockGrid(self.q_pos, self.k_pos, self.offset, *parts)


def grid(q_pos: Tensor, k_pos: Tensor, end: int, params: CritiPrefill, device: torch.device) -> BlockGrid:
    """q_pos [T], k_pos [n] on the CPU; end: of the input."""
    first, last = int(q_pos[0]), int(q_pos[-1])
    offset = first % params.segment
    starts = torch.arange(first - offset, last + 1, params.segment)
    earliest, latest = extremes(k_pos, params.block)
    allowed = latest[None, :] < starts.clamp(min=first)[:, None]
    own = ~allowed & (earliest[None, :] <= (starts + params.segment - 1).clamp(max=last)[:, None])
    dense = (starts < params.threshold) | (starts // params.segment == (end - 1) // params.segment)
    clear = clear_blocks(q_pos, k_pos, params.segment, params.block, offset)
    return BlockGrid(q_pos, k_pos.clone(), offset, allowed, own, dense[:, None], clear).to(device)


class Criticality:
    """Scores of the layer before, for the segments being read."""

    def __init__(self, params: CritiPrefill):
        self.params = params
        self._before: Tensor | None = None
        self._grid: BlockGrid | None = None

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int, scale: float
    ) -> BlockSparseIndex | None:
        """See `Choice`. Layers come in order; `scale` does not change which blocks are best."""
        p = self.params
        if layer == 0:
            self._before = self._grid = None
        first, last = int(q_pos[0]), int(q_pos[-1])
        if layer < p.skip or last < p.threshold or last // p.segment == first // p.segment == (end - 1) // p.segment:
            return None
        at = self._grid
        if at is None or not (torch.equal(at.q_pos, q_pos) and torch.equal(at.k_pos, k_pos)):
            at = grid(q_pos, k_pos, end, p, q.device)
        at = self._grid = at.to(q.device)
        score = shares(criticality(q, k, p.segment, p.block, at.offset), at.allowed)
        before = score if self._before is None or self._before.shape != score.shape else self._before.to(score.device)
        self._before = fuse(score, before, p.fusion)
        chosen = best(self._before, at.allowed, p.budget // p.block)
        mark = torch.where(at.dense, at.allowed, chosen) | at.own
        return build_index(mark, at.clear, p.segment, p.block, at.offset)


def criticality(q: Tensor, k: Tensor, segment: int, block: int, offset: int = 0) -> Tensor:
    """raw [Hkv, S, B] float32 of queries [T, Hq, d] and keys [n, Hkv, d] (algorithm 1, without scale and softmax).

    max( mean(Qmax Kmax, Qmin Kmax), mean(Qmax Kmin, Qmin Kmin) ), averaged over the query heads of a group.
    """
    q_max, q_min = (each.to(wide(q.dtype)) for each in bounds(q, segment, offset))
    k_max, k_min = (each.to(wide(q.dtype)) for each in bounds(k, block))
    group = q.shape[1] // k.shape[1]
    # The mean of both products is the product of the mean: extremes of the queries are averaged first.
    middle = ((q_max + q_min) / 2).unflatten(1, (-1, group))
    high, low = (torch.einsum("shgd,bhd->hgsb", middle, extreme) for extreme in (k_max, k_min))
    return torch.maximum(high, low).mean(1)


def shares(raw: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of raw [Hkv, S, B] over the allowed [S, B] blocks; zeros for a segment that has none."""
    masked = raw.masked_fill(~allowed, float("-inf"))
    return torch.where(allowed.any(-1)[:, None], masked.softmax(-1), 0.0)


def fuse(score: Tensor, before: Tensor, weight: float) -> Tensor:
    """weight * score + (1 - weight) * the fused score of the layer before (algorithm 2)."""
    return weight * score + (1 - weight) * before


def best(score: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool [Hkv, S, B]: the `count` allowed blocks of the largest score, all of them where there are fewer."""
    masked = score.masked_fill(~allowed, -1.0)
    top = masked.topk(min(count, score.shape[-1]), dim=-1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, top, True) & allowed


def bounds(x: Tensor, size: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Elementwise (max, min) [ceil, heads, d] over runs of `size` rows of x; the first run lacks `offset` rows."""
    lacking = -(x.shape[0] + offset) % size
    runs = math.ceil((x.shape[0] + offset) / size)
    # Filled up with rows that are there, so that none of the extremes changes.
    head, tail = x[:1].expand(offset, -1, -1), x[-1:].expand(lacking, -1, -1)
    full = torch.cat([head, x, tail]) if offset or lacking else x
    parts = full.view(runs, size, *x.shape[1:])
    return parts.amax(1), parts.amin(1)
