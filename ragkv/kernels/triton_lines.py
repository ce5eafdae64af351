"""The Triton kernel of `lines.py`: select lines that cover an attention matrix.

One program handles one attention head, since every selected line changes the worth of the crossing lines. Lines are in
groups of `GROUP`, and the best worth of every group is kept. The next line is found among the groups, then in its
group. It changes one crossing line in each sampled row, and the groups of those lines. A cell that is on a selected
line, or that causality hides, is -1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ragkv.kernels.line_types import LineSelection, Prices, residuals

GROUP = 256
"""Lines of a group."""


def cover(cells: Tensor, at: Tensor, present: Tensor, alpha: float, price: Prices) -> LineSelection:
    """Compute `lines.cover` in float32."""
    heads, rows, width = cells.shape
    start = residuals(cells.float(), at, present, alpha)
    groups = triton.cdiv(width, GROUP)
    weight, length, worth = (
        F.pad(each.view(heads, 2, width), (0, groups * GROUP - width))
        for each in (start.weight, start.length, start.worth)
    )
    best = worth.view(heads, 2 * groups, GROUP).amax(-1)
    selected = torch.zeros_like(length, dtype=torch.int8)
    paid = torch.zeros(heads, price.diagonal.shape[0], dtype=torch.int8, device=cells.device)
    covered, cost = torch.zeros_like(start.target), torch.zeros_like(start.target)
    cell_counts = torch.zeros(heads, dtype=torch.int32, device=cells.device)
    _cover[(heads,)](
        start.left, weight, length, worth, best, selected, paid, at.int(), start.target,
        price.diagonal, price.column, covered, cell_counts, cost, price.most, rows, width, groups,
        price.diagonal.shape[0],
        TILE=price.tile, ROWS=triton.next_power_of_2(rows), GROUPS=triton.next_power_of_2(groups), GROUP=GROUP,
        num_warps=8,
    )  # fmt: skip
    chosen = selected[:, :, :width].bool()
    return LineSelection(chosen[:, 0], chosen[:, 1], covered, cell_counts.long(), cost)


@triton.jit
def _best(worth_ptr, best_ptr, groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the largest worth of one family of lines and the lowest number that has it."""
    lane = tl.arange(0, GROUPS)
    best = tl.load(best_ptr + lane, mask=lane < groups, other=-1.0)
    top = tl.max(best, 0)
    group = tl.min(tl.where(best == top, lane, GROUPS), 0)
    inside = tl.arange(0, GROUP)
    worth = tl.load(worth_ptr + group * GROUP + inside)
    return top, group * GROUP + tl.min(tl.where(worth == top, inside, GROUP), 0)


@triton.jit(do_not_specialize=["most", "rows", "width", "groups", "diagonals"])
def _cover(
    left_ptr, weight_ptr, length_ptr, worth_ptr, best_ptr, selected_ptr, paid_ptr, at_ptr, target_ptr,
    diagonal_ptr, column_ptr, covered_ptr, cell_counts_ptr, cost_ptr, most, rows, width, groups, diagonals,
    TILE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Select the lines of one head."""
    head = tl.program_id(0).to(tl.int64)
    left_ptr += head * rows * width
    family = groups * GROUP
    weight_ptr += head * 2 * family
    length_ptr += head * 2 * family
    worth_ptr += head * 2 * family
    selected_ptr += head * 2 * family
    best_ptr += head * 2 * groups
    paid_ptr += head * diagonals
    target = tl.load(target_ptr + head)
    row = tl.arange(0, ROWS)
    at = tl.load(at_ptr + row, mask=row < rows, other=-1)
    covered = 0.0
    cost = 0.0
    cell_counts = 0
    active = target > 0
    while active:
        best_v, line_v = _best(worth_ptr, best_ptr, groups, GROUPS, GROUP)
        best_s, line_s = _best(worth_ptr + family, best_ptr + groups, groups, GROUPS, GROUP)
        active = tl.maximum(best_v, best_s) > 0
        if active:
            by_slash = best_s >= best_v
            line = tl.where(by_slash, line_s, line_v)
            own = tl.where(by_slash, family, 0) + line
            near, far = line // TILE, (line + TILE - 1) // TILE
            new_near = tl.load(paid_ptr + near) == 0
            new_far = (tl.load(paid_ptr + far) == 0) & (far != near)
            price = tl.where(new_near, tl.load(diagonal_ptr + near), 0.0)
            price += tl.where(new_far, tl.load(diagonal_ptr + far), 0.0)
            cost += tl.where(by_slash, price, tl.load(column_ptr + line))
            other = at - line
            crossed = other >= 0
            cell = left_ptr + row.to(tl.int64) * width + tl.where(by_slash, other, line)
            value = tl.load(cell, mask=crossed, other=-1.0)
            gain = tl.maximum(value, 0.0)
            new_cells = (value >= 0).to(tl.int32)
            crossing = tl.where(by_slash, 0, family) + other
            weight = tl.load(weight_ptr + crossing, mask=crossed, other=0.0) - gain
            length = tl.load(length_ptr + crossing, mask=crossed, other=0) - new_cells
            tl.debug_barrier()
            tl.store(cell, -1.0, mask=crossed)
            tl.store(weight_ptr + crossing, weight, mask=crossed)
            tl.store(length_ptr + crossing, length, mask=crossed)
            tl.store(worth_ptr + crossing, tl.where(length > 0, weight / tl.maximum(length, 1), 0.0), mask=crossed)
            tl.store(worth_ptr + own, 0.0)
            tl.store(length_ptr + own, 0)
            tl.store(selected_ptr + own, 1)
            tl.store(paid_ptr + near, 1, mask=by_slash)
            tl.store(paid_ptr + far, 1, mask=by_slash)
            tl.debug_barrier()
            # Groups with a change. Rows that the line does not cross update the group of the line itself.
            group = tl.where(crossed, crossing, own) // GROUP
            worth = tl.load(worth_ptr + (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :])
            tl.store(best_ptr + group, tl.max(worth, 1))
            mine = own // GROUP
            tl.store(best_ptr + mine, tl.max(tl.load(worth_ptr + mine * GROUP + tl.arange(0, GROUP)), 0))
            tl.debug_barrier()
            covered += tl.sum(gain, 0)
            cell_counts += tl.sum(new_cells, 0)
            active = (covered < target) & (cost <= most)
    tl.store(covered_ptr + head, covered)
    tl.store(cell_counts_ptr + head, cell_counts)
    tl.store(cost_ptr + head, cost)
