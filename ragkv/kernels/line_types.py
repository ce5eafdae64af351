"""Vertical and slash lines of an attention matrix: their prices, weights and the result of a selection.

cells    [H, R, P] attention of R sampled rows to P positions; each row sums to 1
line     a vertical line is a column c, numbered c; a slash line is all cells with row - column = o, numbered P + o
weight   of a line: the sum of its cells that no line selected before holds
length   of a line: the number of those cells
worth    weight / length
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prices:
    """What reading a line costs, as a share of all cells.

    Attributes:
        tile: rows and columns of a tile.
        diagonal: [D] float32. Price of the tiles on each tile diagonal.
        column: [P] float32. Price of a column.
        most: a head stops once it has spent more than this.
    """

    tile: int
    diagonal: Tensor
    column: Tensor
    most: float


@dataclass(frozen=True)
class LineSelection:
    """Selected lines of each head.

    Attributes:
        vertical: [H, P] bool, by position.
        slash: [H, P] bool, by offset.
        covered: [H]. Sampled attention on the lines.
        cells: [H] int64. Sampled cells on the lines.
        cost: [H] float32. Price of the lines.
    """

    vertical: Tensor
    slash: Tensor
    covered: Tensor
    cells: Tensor
    cost: Tensor


@dataclass(frozen=True)
class Residuals:
    """State before the first line is selected. Vertical lines come first, slash lines behind them.

    Attributes:
        left: [H, R, P]. Cells; -1 where there is none.
        weight: [H, 2P].
        length: [H, 2P] int32.
        worth: [H, 2P].
        target: [H]. Attention to cover.
    """

    left: Tensor
    weight: Tensor
    length: Tensor
    worth: Tensor
    target: Tensor


def prices(first: int, last: int, tile: int, most: float, device: torch.device | str = "cpu") -> Prices:
    """Compute prices for rows at positions first..last, as if every position up to the last one had a key."""
    return tile_prices(torch.arange(first // tile, last // tile + 1), last, tile, most, device)


def tile_prices(rows: Tensor, last: int, tile: int, most: float, device: torch.device | str = "cpu") -> Prices:
    """Compute prices for tiles of rows, which may lie apart.

    Args:
        rows: [S]. Ascending numbers of the tile columns in which the tiles of rows end.
        last: position of the last row.
        tile: rows and columns of a tile.
        most: a head stops once it has spent more than this.
        device: where lines are selected.
    """
    later = rows.shape[0] - torch.searchsorted(rows, torch.arange(last // tile + 2))  # tiles of rows at or behind each
    total = float((rows + 1).sum())
    column = later[torch.arange(last + 1) // tile] / (tile * total)
    return Prices(tile, (later / total).float().to(device), column.float().to(device), most)


def residuals(cells: Tensor, at: Tensor, present: Tensor, alpha: float) -> Residuals:
    """Compute weights and lengths before any line is selected, in the dtype of `cells`.

    Args:
        cells: [H, R, P].
        at: [R]. Position of each sampled row.
        present: [P] bool. Positions that have a key.
        alpha: share of the attention to cover.
    """
    heads, _, width = cells.shape
    # Entry (i, o): the column of row i on slash line o. It is also the slash line of row i in column o.
    column = at[:, None] - torch.arange(width, device=cells.device)
    inside = column >= 0
    left = torch.where(present & inside, cells, -1.0)
    slash = torch.where(inside, left.gather(2, column.clamp(min=0).expand(heads, -1, -1)), -1.0)
    weight = torch.cat([each.clamp(min=0).sum(1) for each in (left, slash)], 1)
    length = torch.cat([(each >= 0).sum(1, dtype=torch.int32) for each in (left, slash)], 1)
    worth = torch.where(length > 0, weight / length.clamp(min=1), 0.0)
    return Residuals(left, weight, length, worth, alpha * left.clamp(min=0).sum((1, 2)))
