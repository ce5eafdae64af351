"""LoopServe: in every turn of a conversation the new rows choose the lines of the attention matrix that they need.

Paper: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv 2507.13681),
algorithms 1 and 2, Eq. 6. Its decoding half (algorithm 3) is a decode policy.

    rows        R sampled rows of the new ones
    cells       [H, R, P] their attention by position, H query heads; each row sums to 1
    vertical c  column c, whole                     slash o    all cells with row - column = o
    weight      sum of a line's sampled cells       length     how many of them causality allows

Lines are taken until they cover `alpha` of the sampled attention, the best weight per length first. A line's weight and
length count only cells that no line taken before holds, so what is covered is the sum of what was gained.

Differs from the paper: its overlap terms subtract the largest cell of every crossing line, again and again, so that its
estimate of the coverage falls and every line is taken (algorithm 2 ends dense; the golden example of the tests shows
it); residual weights are exact instead. The main diagonal and the first key are always taken, so no row is empty.
Lines are read in whole tiles of `tile` rows and columns: what a tile holds beside its lines is read too, and covers
more. Where this would be more than `dense` of all cells, an attention head reads everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.block_index import BlockSparseIndex, build_index, clear_blocks, extremes
from ragkv.kernels.line_types import LineSelection, prices
from ragkv.kernels.lines import cover
from ragkv.sparse.base import wide


@dataclass(frozen=True)
class LoopServe:
    """alpha: share of the attention to cover (paper: .955 in its setup, .99 and more in its study; 1 is dense) ·
    sample: rows that choose (paper silent) · tile: rows and columns that are read together (paper silent) · dense:
    share of the cells above which an attention head reads all of them (paper silent) · threshold: inputs that end
    before this position stay dense (paper silent)."""

    alpha: float = 0.955
    sample: int = 64
    tile: int = 64
    dense: float = 0.6
    threshold: int = 4096

    def __post_init__(self) -> None:
        if not (0 < self.alpha <= 1 and 0 < self.dense <= 1):
            raise ValueError("alpha and dense must be above 0 and at most 1")
        if self.sample < 1 or self.tile < 1 or self.threshold < 0:
            raise ValueError("sample and tile must be at least 1, threshold not negative")

    def applies(self, tokens: int) -> bool:
        """Inputs above the threshold, unless all of the attention is to be covered."""
        return tokens > self.threshold and self.alpha < 1

    def start(self) -> Turns:
        """State of one request, or of one conversation."""
        return Turns(self)


@dataclass
class Turns:
    """State of a conversation. lines: per layer, of every turn that was read sparsely, the numbers (attention head,
    line) [2, m] of its vertical and of its slash lines; what an earlier turn chose is never changed (algorithm 1)."""

    params: LoopServe
    lines: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int, scale: float
    ) -> BlockSparseIndex | None:
        """See `Choice`. Rows no more than the sample are read densely: choosing would cost as much."""
        p = self.params
        last = int(q_pos[-1])
        if p.alpha >= 1 or q.shape[0] <= p.sample or last < p.threshold:
            return None
        rows = sampled(q.shape[0], p.sample)
        at, present = q_pos[rows].to(q.device), torch.zeros(last + 1, dtype=torch.bool)
        present[k_pos[k_pos <= last]] = True
        cells = attention(q[rows.to(q.device)], k, q_pos[rows], k_pos, scale=scale)
        price = prices(int(q_pos[0]), last, p.tile, p.dense, q.device)
        lines = cover(cells, at, present.to(q.device), p.alpha, price)
        lines.vertical[:, int(k_pos.min())] = True
        lines.slash[:, 0] = True
        lists = tiles(lines, q_pos, k_pos, p.tile, p.dense)
        if lists is not None:
            self.lines.setdefault(layer, []).append((lines.vertical.nonzero().T.int(), lines.slash.nonzero().T.int()))
        return lists


def sampled(rows: int, sample: int) -> Tensor:
    """The last row of each of `sample` equal strata of `rows` rows [min(sample, rows)]: the last one is among them."""
    count = min(sample, rows)
    return (torch.arange(1, count + 1) * rows) // count - 1


def attention(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Attention of some rows q [R, Hq, d] to all keys k [n, Hkv, d], by position: [Hq, R, P], P behind the last
    row's."""
    group, width = q.shape[1] // k.shape[1], int(q_pos.max()) + 1
    asked, keys = (each.to(wide(q.dtype)) for each in (q.unflatten(1, (-1, group)), k))
    scores = torch.einsum("rhgd,nhd->hgrn", asked, keys).flatten(0, 1) * scale
    scores.masked_fill_((k_pos[None, :] > q_pos[:, None]).to(q.device), float("-inf"))
    shares = scores.softmax(-1)
    if torch.equal(k_pos, torch.arange(width)):
        return shares
    inside = k_pos < width
    by_position = shares.new_zeros(*shares.shape[:2], width)
    by_position[:, :, k_pos[inside].to(q.device)] = shares[:, :, inside.to(q.device)]
    return by_position


def tiles(lines: LineSelection, q_pos: Tensor, k_pos: Tensor, tile: int, dense: float) -> BlockSparseIndex | None:
    """The lines as lists per query head: blocks that slash lines cross, and the vertical lines as columns; None when
    more than `dense` of all cells would be read. q_pos: consecutive."""
    device, first, last = lines.slash.device, int(q_pos[0]), int(q_pos[-1])
    offset = first % tile
    low = torch.arange(first - offset, last + 1, tile)
    high = (low + tile - 1).clamp(max=last)
    earliest, latest = extremes(k_pos, tile)
    seen = earliest[None, :] <= high[:, None]
    nearest = (low[:, None] - latest[None, :]).clamp(min=0)
    farthest = (high[:, None] - earliest[None, :]).clamp(min=-1)
    taken = F.pad(lines.slash.cumsum(1, dtype=torch.int32), (1, 0))
    nearest, farthest, seen = nearest.to(device), farthest.to(device), seen.to(device)
    mark = (taken[:, farthest + 1] > taken[:, nearest.clamp(max=last + 1)]) & seen
    inside = k_pos <= last
    columns = lines.vertical[:, torch.where(inside, k_pos, 0).to(device)] & inside.to(device)
    share = mark.sum((1, 2)) / seen.sum() + columns.sum(1) / k_pos.shape[0]
    heavy = (share > dense) | (lines.cost > dense)
    if float(torch.where(heavy, 1.0, share).mean()) > dense:
        return None
    mark |= heavy[:, None, None] & seen
    columns &= ~heavy[:, None]
    in_order = bool((k_pos[1:] > k_pos[:-1]).all())
    until = torch.searchsorted(k_pos, high, right=True) if in_order else None
    clear = clear_blocks(q_pos, k_pos, tile, tile, offset).to(device)
    return build_index(mark, clear, tile, tile, offset, columns, until)
