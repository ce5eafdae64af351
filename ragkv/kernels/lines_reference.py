"""The torch reference of `lines.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ragkv.kernels.line_types import LineSelection, Prices, residuals


def cover(cells: Tensor, at: Tensor, present: Tensor, alpha: float, price: Prices) -> LineSelection:
    """Compute `lines.cover` in torch, all heads in lockstep."""
    heads, rows, width = cells.shape
    start, row_numbers = residuals(cells, at, present, alpha), torch.arange(rows)
    left, weight, length, worth = start.left, start.weight, start.length, start.worth
    selected = torch.zeros(heads, 2 * width, dtype=torch.bool)
    paid = torch.zeros(heads, price.diagonal.shape[0], dtype=torch.bool)
    covered, cell_counts = torch.zeros_like(start.target), torch.zeros(heads, dtype=torch.int64)
    cost = torch.zeros(heads)
    while True:
        (best_v, line_v), (best_s, line_s) = worth[:, :width].max(1), worth[:, width:].max(1)
        active = (covered < start.target) & (cost <= price.most) & (torch.maximum(best_v, best_s) > 0)
        head = active.nonzero()[:, 0]
        if not head.numel():
            return LineSelection(selected[:, :width], selected[:, width:], covered, cell_counts, cost)
        by_slash = (best_s >= best_v)[head]
        line = torch.where(by_slash, line_s[head], line_v[head])
        own = torch.where(by_slash, width, 0) + line
        selected[head, own] = True
        for diagonal in (line // price.tile, -(-line // price.tile)):
            new = by_slash & ~paid[head, diagonal]
            cost[head] += torch.where(new, price.diagonal[diagonal], 0.0)
            paid[head[new], diagonal[new]] = True
        cost[head] += torch.where(by_slash, 0.0, price.column[line])

        other = at - line[:, None]  # [heads, R]: the number of the line that crosses in each row
        h, i = (other >= 0).nonzero(as_tuple=True)
        other, h_all = other[h, i], head[h]
        column = torch.where(by_slash[h], other, line[h])
        value = left[h_all, row_numbers[i], column]
        gain, new_cells = value.clamp(min=0), (value >= 0).int()
        covered.index_add_(0, h_all, gain)
        cell_counts.index_add_(0, h_all, new_cells.long())
        left[h_all, row_numbers[i], column] = -1.0
        crossing = torch.where(by_slash[h], 0, width) + other
        weight[h_all, crossing] -= gain
        length[h_all, crossing] -= new_cells
        count = length[h_all, crossing]
        worth[h_all, crossing] = torch.where(count > 0, weight[h_all, crossing] / count.clamp(min=1), 0.0)
        worth[head, own] = 0.0
        length[head, own] = 0
