"""Tiles of query rows: which consecutive rows of a pass share the keys that they read.

    consecutive rows    a prefill, a question: tiles are counted from position 0, so an input that is read in parts has
                        the same tiles as one pass
    scattered rows      repaired tokens, with a question behind them: tiles are counted from the first row, and have
                        fewer rows, so that a tile spans about as many positions as one of consecutive rows

A tile of scattered rows must read every key between its first and its last row. If it had as many rows as a tile of
consecutive ones, it would span several chunks and read nearly everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ROWS = 16
"""Fewest rows of a tile of scattered rows: the block-sparse kernel multiplies at least as many."""


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of the rows of one pass.

    Attributes:
        size: Rows of a tile.
        offset: Rows that the first tile lacks at its start.
        starts: Position [S] at which a tile starts. The first one may start before the first row.
        first: Position [S] of the first row of a tile.
        last: Position [S] of the last row of a tile.
    """

    size: int
    offset: int
    starts: Tensor
    first: Tensor
    last: Tensor


def query_tiles(q_pos: Tensor, size: int) -> QueryTiles:
    """Divide rows at ascending positions [T] into tiles of at most `size` rows, which span about `size` positions."""
    count, start = q_pos.shape[0], int(q_pos[0])
    span = int(q_pos[-1]) - start + 1
    if span == count:
        offset = start % size
    else:
        size, offset = scattered_size(size, count, span), 0
    begin = torch.arange(-offset, count, size)
    first = q_pos[begin.clamp(min=0)]
    last = q_pos[(begin + size - 1).clamp(max=count - 1)]
    return QueryTiles(size, offset, torch.cat([first[:1] - offset, first[1:]]), first, last)


def scattered_size(size: int, count: int, span: int) -> int:
    """Return the rows of a tile for `count` rows over `span` positions: a power of two of at most `size` rows."""
    rows = min(size, max(LEAST_ROWS, size * count // span))
    return 1 << (rows.bit_length() - 1)
