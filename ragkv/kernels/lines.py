"""Which vertical and slash lines cover an attention matrix: greedy on exact residuals (LoopServe, algorithm 2, Eq. 6).

    cells      [H, R, P] attention of R sampled rows by position, P positions; each row sums to 1
    line       a vertical one is a column c; a slash one all cells with row - column = o; numbers c, and P + o
    weight     of a line: the sum of its cells that no line taken before holds · length: how many these are
    worth      weight / length; the best is taken next, on ties a slash line, then the lower number

Taking a line changes one cell of each sampled row, so it corrects as many crossing lines. Each head stops when what it
covers is enough, or when what it would read is too much: lines are read in tiles, so a slash line costs the one or two
tile diagonals that it crosses, once. The reference goes through all attention heads in step; on a GPU its Triton twin
takes its place (`triton_lines.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prices:
    """What a line adds to what is read, as shares of all cells. tile: rows and columns of a tile · diagonal [D]
    float32: of the tiles that are so many apart · column [P] float32: of a column · most: a head above this stops."""

    tile: int
    diagonal: Tensor
    column: Tensor
    most: float


@dataclass(frozen=True)
class LineSelection:
    """vertical, slash [H, P] bool, by position and by offset · covered [H]: sampled attention that they hold · cells
    [H] int64: sampled cells that they hold · spent [H] float32: their price."""

    vertical: Tensor
    slash: Tensor
    covered: Tensor
    cells: Tensor
    spent: Tensor


@dataclass(frozen=True)
class Residuals:
    """Where the greedy choice starts. left [H, R, P]: cells, -1 where there is none · weight, worth [H, 2P], length
    [H, 2P] int32: of the vertical lines and, behind them, of the slash lines · target [H]."""

    left: Tensor
    weight: Tensor
    length: Tensor
    worth: Tensor
    target: Tensor


def prices(first: int, last: int, tile: int, most: float, device: torch.device | str = "cpu") -> Prices:
    """For rows at positions first..last, as if every position up to the last one had a key."""
    rows = torch.arange(first // tile, last // tile + 1)
    later = rows.shape[0] - torch.searchsorted(rows, torch.arange(last // tile + 2))  # tiles of rows at or behind each
    total = float((rows + 1).sum())
    column = later[torch.arange(last + 1) // tile] / (tile * total)
    return Prices(tile, (later / total).float().to(device), column.float().to(device), most)


def cover(cells: Tensor, at: Tensor, present: Tensor, alpha: float, price: Prices) -> LineSelection:
    """Lines that cover `alpha` of cells [H, R, P], or as much of it as is paid for.

    at [R]: position of each sampled row · present [P] bool: positions that have a key. On a GPU the Triton twin runs.
    """
    if cells.is_cuda:
        from ragkv.kernels.triton_lines import cover as twin

        return twin(cells, at, present, alpha, price)
    return reference(cells, at, present, alpha, price)


def residuals(cells: Tensor, at: Tensor, present: Tensor, alpha: float) -> Residuals:
    """Weights and lengths before any line is taken; in cells' dtype."""
    heads, _, width = cells.shape
    column = at[:, None] - torch.arange(
        width, device=cells.device
    )  # of row i on slash o; its offset in column o as well
    inside = column >= 0
    left = torch.where(present & inside, cells, -1.0)
    slash = torch.where(inside, left.gather(2, column.clamp(min=0).expand(heads, -1, -1)), -1.0)
    weight = torch.cat([each.clamp(min=0).sum(1) for each in (left, slash)], 1)
    length = torch.cat([(each >= 0).sum(1, dtype=torch.int32) for each in (left, slash)], 1)
    worth = torch.where(length > 0, weight / length.clamp(min=1), 0.0)
    return Residuals(left, weight, length, worth, alpha * left.clamp(min=0).sum((1, 2)))


def reference(cells: Tensor, at: Tensor, present: Tensor, alpha: float, price: Prices) -> LineSelection:
    """`cover` in torch."""
    heads, rows, width = cells.shape
    start, each = residuals(cells, at, present, alpha), torch.arange(rows)
    left, weight, length, worth = start.left, start.weight, start.length, start.worth
    taken = torch.zeros(heads, 2 * width, dtype=torch.bool)
    drawn = torch.zeros(heads, price.diagonal.shape[0], dtype=torch.bool)
    covered, held = torch.zeros_like(start.target), torch.zeros(heads, dtype=torch.int64)
    spent = torch.zeros(heads)
    while True:
        (best_v, take_v), (best_s, take_s) = worth[:, :width].max(1), worth[:, width:].max(1)
        going = (covered < start.target) & (spent <= price.most) & (torch.maximum(best_v, best_s) > 0)
        head = going.nonzero()[:, 0]
        if not head.numel():
            return LineSelection(taken[:, :width], taken[:, width:], covered, held, spent)
        by_slash = (best_s >= best_v)[head]
        line = torch.where(by_slash, take_s[head], take_v[head])
        own = torch.where(by_slash, width, 0) + line
        taken[head, own] = True
        for diagonal in (line // price.tile, -(-line // price.tile)):
            new = by_slash & ~drawn[head, diagonal]
            spent[head] += torch.where(new, price.diagonal[diagonal], 0.0)
            drawn[head[new], diagonal[new]] = True
        spent[head] += torch.where(by_slash, 0.0, price.column[line])

        other = at - line[:, None]  # [heads, R]: the number of the line that crosses in each row
        h, i = (other >= 0).nonzero(as_tuple=True)
        other, h_all = other[h, i], head[h]
        place = torch.where(by_slash[h], other, line[h])
        value = left[h_all, each[i], place]
        gain, fresh = value.clamp(min=0), (value >= 0).int()
        covered.index_add_(0, h_all, gain)
        held.index_add_(0, h_all, fresh.long())
        left[h_all, each[i], place] = -1.0
        crossing = torch.where(by_slash[h], 0, width) + other
        weight[h_all, crossing] -= gain
        length[h_all, crossing] -= fresh
        many = length[h_all, crossing]
        worth[h_all, crossing] = torch.where(many > 0, weight[h_all, crossing] / many.clamp(min=1), 0.0)
        worth[head, own] = 0.0
        length[head, own] = 0
