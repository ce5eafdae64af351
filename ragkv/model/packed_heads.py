"""Layers whose heads differ from those that rows are stored in.

Caches and stores have rows of one form, [kv heads, head size]. Where layers differ (Gemma 4: 16 heads of 256 in layers
with a window, 4 of 512 in the others), the form is that of the smallest head size and the widest row. A head of another
size is several of it, and what is left of a row is 0. Where such heads are no part of the query heads, they are fewer
and larger. Attention and rotation see a layer's own heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PackedHeads:
    """How the heads of a layer lie in stored rows.

    Attributes:
        heads: kv heads of the layer.
        size: their size.
        stored: heads and head size of a stored row.
    """

    heads: int
    size: int
    stored: tuple[int, int]

    def pack(self, rows: Tensor) -> Tensor:
        """Return rows [m, heads, size] of the layer as stored rows."""
        left = self.stored[0] * self.stored[1] - self.heads * self.size
        return F.pad(rows.flatten(1), (0, left)).view(-1, *self.stored)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return stored rows as rows of the layer."""
        return rows.flatten(1)[:, : self.heads * self.size].view(-1, self.heads, self.size)


def stored_heads(shapes: Sequence[tuple[int, int]], queries: int) -> tuple[int, int] | None:
    """Return the (kv heads, head size) of stored rows for layers of these; None where no size divides all others.

    Args:
        shapes: (kv heads, head size) of each layer.
        queries: query heads; a multiple of the stored kv heads.
    """
    size = min(size for _, size in shapes)
    if any(each % size for _, each in shapes):
        return None
    width = max(heads * each for heads, each in shapes)
    heads = math.gcd(width // size, queries)
    return heads, width // heads
