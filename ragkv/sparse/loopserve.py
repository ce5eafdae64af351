"""LoopServe: in every turn of a conversation, the new rows select the lines of the attention matrix that they need.

Paper: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv 2507.13681),
algorithms 1 and 2, Eq. 6. Its decoding half (algorithm 3) is a decode policy, `reselect.py`. That half reads the lines
of all turns, which the state of the conversation keeps (algorithm 1, line 7).

    rows        R sampled rows of the new ones
    cells       [H, R, P] their attention by position, H query heads; each row sums to 1
    vertical c  the whole column c              slash o     all cells with row - column = o
    weight      sum of a line's sampled cells   length      how many of its cells causality allows

Lines are selected until they cover `alpha` of the sampled attention, the best weight per length first. Weight and
length of a line count only cells that no previously selected line holds, so the coverage is the sum of these weights.

Differs from the paper:

- The paper's overlap terms subtract the largest cell of every crossing line, again and again. Its estimate of the
  coverage falls, and every line is selected (algorithm 2 ends dense; the golden example of the tests shows it). Here,
  residual weights are exact.
- The main diagonal and the first key are always selected, so no row is empty.
- Lines are read in whole tiles of `tile` rows and columns. The other cells of a tile are read too and add coverage.
- If an attention head would read more than `dense` of all cells, it reads everything and keeps no lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.block_index import BlockSparseIndex, build_index, clear_blocks, extremes
from ragkv.kernels.line_types import LineSelection, tile_prices
from ragkv.kernels.lines import cover
from ragkv.sparse.attention import score_dtype
from ragkv.sparse.tiles import query_tiles


@dataclass(frozen=True)
class LoopServe:
    """Parameters.

    Attributes:
        alpha: Share of the attention to cover (paper: .955 in its setup, .99 and more in its study); 1 is dense.
        sample: Sampled rows, which select the lines (paper silent).
        tile: Rows and columns that are read together (paper silent).
        dense: An attention head that would read a larger share of the cells than this reads all of them (paper
            silent).
        threshold: Inputs that end before this position stay dense (paper silent).
    """

    alpha: float = 0.955
    sample: int = 64
    tile: int = 64
    dense: float = 0.6
    threshold: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.alpha <= 1 and 0 < self.dense <= 1):
            raise ValueError("alpha and dense must be above 0 and at most 1")
        if self.sample < 1 or self.tile < 1 or self.threshold < 0:
            raise ValueError("sample and tile must be at least 1, threshold not negative")

    def why_dense(self, rows: int, keys: int) -> str:
        """See `PrefillPolicy.why_dense`."""
        if self.alpha >= 1:
            return "alpha=1 covers everything"
        if keys > self.threshold:
            return ""
        return f"the input ends after {keys} tokens, threshold={self.threshold} asks for more"

    def start(self) -> LoopServeState:
        """Create the state of one request, or of one conversation."""
        return LoopServeState(self)


@dataclass(frozen=True)
class PassLines:
    """The lines that the rows of one pass selected in one layer, as pairs (query head, line).

    Attributes:
        vertical: [2, m] int32. The line is the position of its keys.
        slash: [2, m] int32. The line is the distance from a row back to its key.
        unlimited: [Hq] bool. Heads that read everything. They have no lines.
        last: Position of the last row.
    """

    vertical: Tensor
    slash: Tensor
    unlimited: Tensor
    last: int

    @property
    def bytes(self) -> int:
        """Bytes of the lines."""
        return sum(part.nbytes for part in (self.vertical, self.slash, self.unlimited))


@dataclass
class LoopServeState:
    """State of a conversation.

    Attributes:
        params: The parameters.
        lines: Per layer, an entry for every pass of every turn, in order. A later turn never changes the entry of an
            earlier one (algorithm 1, line 7).
    """

    name: ClassVar[str] = "loopserve"
    read_all: ClassVar[str] = "the lines that cover alpha would read more than the share `dense` of all pairs"
    params: LoopServe
    lines: dict[int, list[PassLines]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """See `PrefillState.bytes`."""
        return sum(each.bytes for passes in self.lines.values() for each in passes)

    def select(
        self, layer: int, q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, end: int | None, scale: float
    ) -> BlockSparseIndex | None:
        """See `PrefillState.select`. At most half of the rows are sampled, so that a short question selects, too."""
        p = self.params
        last = int(q_pos[-1])
        if p.alpha >= 1 or q.shape[0] < 2 or last < p.threshold:
            self._keep(layer, without_lines(q.shape[1], last, q.device))
            return None
        rows = sample_rows(q.shape[0], min(p.sample, q.shape[0] // 2))
        tiles = query_tiles(q_pos, p.tile)
        at, present = q_pos[rows].to(q.device), torch.zeros(last + 1, dtype=torch.bool)
        present[k_pos[k_pos <= last]] = True
        cells = attention_by_position(q[rows.to(q.device)], k, q_pos[rows], k_pos, scale=scale)
        price = tile_prices(tiles.last // p.tile, last, p.tile, p.dense, q.device)
        lines = cover(cells, at, present.to(q.device), p.alpha, price)
        lines.vertical[:, int(k_pos.min())] = True
        lines.slash[:, 0] = True
        index, unlimited = index_lines(lines, q_pos, k_pos, p.tile, p.dense)
        self._keep(layer, lines_of(lines, unlimited, last))
        return index

    def _keep(self, layer: int, lines: PassLines) -> None:
        self.lines.setdefault(layer, []).append(lines)


def lines_of(lines: LineSelection, unlimited: Tensor, last: int) -> PassLines:
    """Return the lines of the heads that are not `unlimited` [Hq] bool; last: position of the last row."""
    limited = ~unlimited[:, None]
    vertical, slash = ((each & limited).nonzero().T.int() for each in (lines.vertical, lines.slash))
    return PassLines(vertical, slash, unlimited, last)


def without_lines(heads: int, last: int, device: torch.device) -> PassLines:
    """Return the lines of a pass in which all query heads read everything; last: position of its last row."""
    nothing = torch.zeros(2, 0, dtype=torch.int32, device=device)
    return PassLines(nothing, nothing, torch.ones(heads, dtype=torch.bool, device=device), last)


def sample_rows(rows: int, sample: int) -> Tensor:
    """Return the last row of each of `sample` equal strata of `rows` rows: [min(sample, rows)], with the last row."""
    count = min(sample, rows)
    return (torch.arange(1, count + 1) * rows) // count - 1


def attention_by_position(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Compute the attention of some rows to all keys, by the position of the key.

    Args:
        q: Queries [R, Hq, d].
        k: Keys [n, Hkv, d].
        q_pos: Positions [R] of the queries.
        k_pos: Positions [n] of the keys.
        scale: Softmax scale.

    Returns:
        [Hq, R, P], where P is the position behind the last row.
    """
    group, width = q.shape[1] // k.shape[1], int(q_pos.max()) + 1
    queries, keys = (x.to(score_dtype(q.dtype)) for x in (q.unflatten(1, (-1, group)), k))
    scores = torch.einsum("rhgd,nhd->hgrn", queries, keys).flatten(0, 1) * scale
    scores.masked_fill_((k_pos[None, :] > q_pos[:, None]).to(q.device), float("-inf"))
    shares = scores.softmax(-1)
    if torch.equal(k_pos, torch.arange(width)):
        return shares
    inside = k_pos < width
    by_position = shares.new_zeros(*shares.shape[:2], width)
    by_position[:, :, k_pos[inside].to(q.device)] = shares[:, :, inside.to(q.device)]
    return by_position


def index_lines(
    lines: LineSelection, q_pos: Tensor, k_pos: Tensor, tile: int, dense: float
) -> tuple[BlockSparseIndex | None, Tensor]:
    """Convert lines to an index with a list per query head.

    Blocks that a slash line crosses become blocks of the index; vertical lines become columns.

    Args:
        lines: The selected lines.
        q_pos: Consecutive positions [T] of the rows.
        k_pos: Positions [n] of the keys.
        tile: Rows and columns of a tile.
        dense: Largest share of the cells that may be read.

    Returns:
        The index, or None if more than `dense` of all cells would be read; and the heads [Hq] bool that read
        everything.
    """
    device, last = lines.slash.device, int(q_pos[-1])
    tiles = query_tiles(q_pos, tile)
    low, high = tiles.starts, tiles.last
    earliest, latest = extremes(k_pos, tile)
    seen = earliest[None, :] <= high[:, None]
    nearest = (low[:, None] - latest[None, :]).clamp(min=0)
    farthest = (high[:, None] - earliest[None, :]).clamp(min=-1)
    slashes_before = F.pad(lines.slash.cumsum(1, dtype=torch.int32), (1, 0))
    nearest, farthest, seen = nearest.to(device), farthest.to(device), seen.to(device)
    mark = (slashes_before[:, farthest + 1] > slashes_before[:, nearest.clamp(max=last + 1)]) & seen
    inside = k_pos <= last
    columns = lines.vertical[:, torch.where(inside, k_pos, 0).to(device)] & inside.to(device)
    share = mark.sum((1, 2)) / seen.sum() + columns.sum(1) / k_pos.shape[0]
    heavy = (share > dense) | (lines.cost > dense)
    if float(torch.where(heavy, 1.0, share).mean()) > dense:
        return None, torch.ones_like(heavy)
    mark |= heavy[:, None, None] & seen
    columns &= ~heavy[:, None]
    in_order = bool((k_pos[1:] > k_pos[:-1]).all())
    until = torch.searchsorted(k_pos, high, right=True) if in_order else None
    clear = clear_blocks(q_pos, k_pos, tiles.size, tile, tiles.offset).to(device)
    return build_index(mark, clear, tiles.size, tile, tiles.offset, columns, until), heavy
