"""Select vertical and slash lines that cover an attention matrix (LoopServe, algorithm 2, Eq. 6).

The selection is greedy on exact residuals: the line of the highest worth is selected next; on ties a slash line, then
the lower number. Selecting a line changes one cell of each sampled row, so the crossing lines are corrected. A head
stops when enough is covered, or when it has spent too much. Lines are read in tiles, so a slash line costs the one or
two tile diagonals that it crosses, each once.

The Triton kernel (`triton_lines.py`) runs on a GPU, the reference (`lines_reference.py`) elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from ragkv.kernels import lines_reference
from ragkv.kernels.line_types import LineSelection, Prices


def cover(cells: Tensor, at: Tensor, present: Tensor, alpha: float, price: Prices) -> LineSelection:
    """Select lines until they cover `alpha` of the attention or the price limit is reached.

    Args:
        cells: [H, R, P]. Attention of the sampled rows.
        at: [R]. Position of each sampled row.
        present: [P] bool. Positions that have a key.
        alpha: share of the attention to cover.
        price: prices of the lines and the limit.
    """
    if cells.is_cuda:
        from ragkv.kernels import triton_lines

        return triton_lines.cover(cells, at, present, alpha, price)
    return lines_reference.cover(cells, at, present, alpha, price)
