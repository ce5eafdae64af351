"""CritiPrefill: neighbouring queries need the same keys, so keys are selected for a whole segment of queries at once.

Paper: CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs
(arXiv 2409.12490), algorithms 1 and 2.

    Qmax, Qmin [S, Hq, d]    elementwise extremes of the queries of a segment
    Kmax, Kmin [B, Hkv, d]   elementwise extremes of the keys of a block
    raw [Hkv, S, B]          how critical a block is for a segment, computed from the extremes
    score [Hkv, S, B]        raw as shares of what the segment may see, fused with the layer before

Every segment reads its own tokens and, from the blocks that lie wholly before it, the `budget` tokens with the best
score. The first layers and the last segment of a long input stay dense. Rows over a stitched context, which are
repaired tokens and the question, form segments of their own (`tiles.py`); all of them select. If they are fewer than
a segment, as a question is, their segments have `few` rows: the words of a question ask for different keys, which the
extremes of a whole question do not tell apart (docs/results/prefill.md).

Differs from the paper:

- Causality is applied before the single softmax, not after four. A softmax over future blocks would let them change
  the scores of past blocks.
- `fusion` is the weight of the current layer. The paper's text says the opposite.
- The softmax has the scale of attention (`scaled`). Algorithm 1 shows none. Without it the shares of all but the very
  best blocks vanish in float32, and which of them are read is left to chance.
- A segment's own tokens do not count against the budget.
- Scores are averaged over the query heads of a group.
- Segments are counted from position 0 and blocks by cache rows. An input that is read in parts, or a turn that follows
  a cached conversation, therefore selects the same blocks as one pass would, if the parts end at segment boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.kernels.block_index import BlockSparseIndex, build_index, clear_blocks, extremes
from ragkv.sparse.attention import score_dtype
from ragkv.sparse.tiles import query_tiles


@dataclass(frozen=True)
class CritiPrefill:
    """Parameters.

    Attributes:
        segment: Queries that share their keys.
        block: Keys that are selected together.
        budget: Tokens selected for a segment besides its own (paper: 1024; paper silent on whether a segment's own
            tokens count).
        fusion: Weight of the current layer (paper silent: its text, .25, contradicts its order of terms).
        skip: Layers that stay dense, from the first on (paper silent).
        threshold: Segments that start before this position stay dense, and so do inputs that end before it (paper
            silent).
        few: Queries of a segment where there are fewer than a segment over a stitched context; a power of two (paper
            silent).
        scaled: Whether the softmax over blocks has the scale of attention (paper silent: its text, no scale).
    """

    segment: int = 512
    block: int = 32
    budget: int = 1024
    fusion: float = 0.75
    skip: int = 1
    threshold: int = 0
    few: int = 4
    scaled: bool = True

    def __post_init__(self) -> None:
        if not (self.block >= 1 and self.segment >= 1 and self.budget >= self.block):
            raise ValueError("block and segment must be at least 1, budget at least a block")
        if self.few < 1 or self.few & (self.few - 1):
            raise ValueError("few must be a power of two")
        if not (0 <= self.fusion <= 1 and self.skip >= 0 and self.threshold >= 0):
            raise ValueError("fusion must be between 0 and 1, skip and threshold not negative")

    def why_dense(self, rows: int, keys: int) -> str:
        """See `PrefillPolicy.why_dense`."""
        if keys > self.threshold:
            return ""
        return f"the input ends after {keys} tokens, threshold={self.threshold} asks for more"

    def start(self) -> CritiPrefillState:
        """Create the state of one request."""
        return CritiPrefillState(self)


@dataclass(frozen=True)
class SegmentLayout:
    """Segments of queries and blocks of keys at given positions.

    Attributes:
        q_pos: Positions [T] of the queries, on the CPU.
        k_pos: Positions [n] of the keys, on the CPU.
        size: Rows of a segment.
        offset: Rows that the first segment lacks at its start.
        allowed: bool [S, B], blocks that lie wholly before a segment: its candidates.
        own: bool [S, B], blocks that are not candidates but visible to the segment.
        dense: bool [S, 1], segments that read everything.
        clear: bool [S, B], as in `build_index`.
        most: Blocks of the segment that reads the most of them.
    """

    q_pos: Tensor
    k_pos: Tensor
    size: int
    offset: int
    allowed: Tensor
    own: Tensor
    dense: Tensor
    clear: Tensor
    most: int

    def to(self, device: torch.device) -> SegmentLayout:
        """Return the layout for rows on another device. Positions stay on the CPU."""
        if self.allowed.device == device:
            return self
        masks = (self.allowed, self.own, self.dense, self.clear)
        allowed, own, dense, clear = (index_to_device(mask, device) for mask in masks)
        return replace(self, allowed=allowed, own=own, dense=dense, clear=clear)


def segment_layout(
    q_pos: Tensor, k_pos: Tensor, end: int | None, params: CritiPrefill, device: torch.device
) -> SegmentLayout:
    """Lay out segments and blocks.

    Args:
        q_pos: Positions [T] of the queries, on the CPU.
        k_pos: Positions [n] of the keys, on the CPU.
        end: As in `PrefillState.select`.
        params: Sizes of segments and blocks.
        device: Device of the masks.
    """
    few = end is None and q_pos.shape[0] <= params.segment
    tiles = query_tiles(q_pos, min(params.segment, params.few) if few else params.segment)
    earliest, latest = extremes(k_pos, params.block)
    allowed = latest[None, :] < tiles.first[:, None]
    own = ~allowed & (earliest[None, :] <= tiles.last[:, None])
    dense = tiles.starts < params.threshold
    if end is not None:
        dense |= tiles.last >= last_segment(end, params.segment)
    clear = clear_blocks(q_pos, k_pos, tiles.size, params.block, tiles.offset)
    # Counted here, on the CPU: counting the selected blocks in every layer would make the host wait for the device.
    candidates = allowed.sum(1)
    selected = torch.where(dense, candidates, candidates.clamp(max=params.budget // params.block))
    most = int((selected + own.sum(1)).max())
    masks = (allowed, own, dense[:, None], clear)
    return SegmentLayout(q_pos, k_pos.clone(), tiles.size, tiles.offset, *masks, most).to(device)


def last_segment(end: int, segment: int) -> int:
    """Return the position at which the last segment of an input starts that ends before position `end`."""
    return (end - 1) // segment * segment


class CritiPrefillState:
    """The fused scores of the layer before, for the segments of the current pass."""

    name = "critiprefill"
    read_all = "its budget covers the blocks before every segment"

    def __init__(self, params: CritiPrefill):
        self.params = params
        self._previous: Tensor | None = None
        self._layout: SegmentLayout | None = None

    @property
    def bytes(self) -> int:
        """See `PrefillState.bytes`."""
        return 0 if self._previous is None else self._previous.nbytes

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int | None, scale: float
    ) -> BlockSparseIndex | None:
        """See `PrefillState.select`."""
        p = self.params
        if layer == 0:
            self._previous = self._layout = None
        first, last = int(q_pos[0]), int(q_pos[-1])
        if layer < p.skip or last < p.threshold or (end is not None and first >= last_segment(end, p.segment)):
            return None
        layout = self._layout
        if layout is None or not (torch.equal(layout.q_pos, q_pos) and torch.equal(layout.k_pos, k_pos)):
            layout = segment_layout(q_pos, k_pos, end, p, q.device)
        layout = self._layout = layout.to(q.device)
        raw = criticality(q, k, layout.size, p.block, layout.offset)
        score = block_shares(raw * scale if p.scaled else raw, layout.allowed)
        previous = self._previous
        previous = score if previous is None or previous.shape != score.shape else previous.to(score.device)
        self._previous = fuse_layers(score, previous, p.fusion)
        selected = top_blocks(self._previous, layout.allowed, p.budget // p.block)
        mark = torch.where(layout.dense, layout.allowed, selected) | layout.own
        return build_index(mark, layout.clear, layout.size, p.block, layout.offset, most=layout.most)


def criticality(q: Tensor, k: Tensor, segment: int, block: int, offset: int = 0) -> Tensor:
    """Compute how critical each block is for each segment (algorithm 1, without scale and softmax).

    The score is max( mean(Qmax Kmax, Qmin Kmax), mean(Qmax Kmin, Qmin Kmin) ), averaged over the query heads of a
    group.

    Args:
        q: Queries [T, Hq, d].
        k: Keys [n, Hkv, d].
        segment: Queries per segment.
        block: Keys per block.
        offset: Rows that the first segment lacks at its start.

    Returns:
        raw [Hkv, S, B] float32.
    """
    q_max, q_min = (bound.to(score_dtype(q.dtype)) for bound in elementwise_bounds(q, segment, offset))
    k_max, k_min = (bound.to(score_dtype(q.dtype)) for bound in elementwise_bounds(k, block))
    group = q.shape[1] // k.shape[1]
    # The mean of both products is the product of the mean, so the extremes of the queries are averaged first.
    middle = ((q_max + q_min) / 2).unflatten(1, (-1, group))
    high, low = (torch.einsum("shgd,bhd->hgsb", middle, extreme) for extreme in (k_max, k_min))
    return torch.maximum(high, low).mean(1)


def block_shares(raw: Tensor, allowed: Tensor) -> Tensor:
    """Compute the softmax of raw [Hkv, S, B] over the allowed [S, B] blocks; zeros for a segment without any."""
    masked = raw.masked_fill(~allowed, float("-inf"))
    return torch.where(allowed.any(-1)[:, None], masked.softmax(-1), 0.0)


def fuse_layers(score: Tensor, previous: Tensor, weight: float) -> Tensor:
    """Compute weight * score + (1 - weight) * the fused score of the layer before (algorithm 2)."""
    return weight * score + (1 - weight) * previous


def top_blocks(score: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Mark the `count` allowed blocks with the largest score, or all if there are fewer: bool [Hkv, S, B]."""
    masked = score.masked_fill(~allowed, -1.0)
    best = masked.topk(min(count, score.shape[-1]), dim=-1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True) & allowed


def elementwise_bounds(x: Tensor, size: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Compute elementwise (max, min) [ceil, heads, d] over runs of `size` rows of x [n, heads, d].

    The first run lacks `offset` rows.
    """
    start = min(x.shape[0], (size - offset) if offset else 0)
    runs = (x.shape[0] - start) // size
    stop = start + runs * size
    # The full runs are a view. Padding the first and the last run to full ones would copy all of x.
    parts = [x[:start][None], x[start:stop].view(runs, size, *x.shape[1:]), x[stop:][None]]
    present = [part for part in parts if part.shape[0] and part.shape[1]]
    if len(present) == 1:
        return present[0].amax(1), present[0].amin(1)
    return torch.cat([part.amax(1) for part in present]), torch.cat([part.amin(1) for part in present])
