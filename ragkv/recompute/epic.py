"""EPIC (Hu et al., "EPIC: Efficient Position-Independent Caching for Serving Large Language Models", 2024): LegoLink.

Every block is kept. The errors of a chunk that was encoded alone are concentrated in its first tokens: they attend only
to themselves and become an attention sink of their own. These few tokens are recomputed in every layer, over everything
before them. The first chunk needs no repair, since nothing precedes it that it has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ragkv.recompute.base import Blocks, Piece, Plan, require_between
from ragkv.recompute.reuse import Reuse


@dataclass(frozen=True)
class Epic(Reuse):
    """Parameters.

    Attributes:
        layers: Layers of the model.
        link: Tokens recomputed at the start of every chunk but the first. The paper tries 1 to 64.
    """

    link: int = 32

    def __post_init__(self) -> None:
        require_between(0, math.inf, link=self.link)

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Keep every block and recompute the first tokens of every chunk but the first."""
        tokens = tuple(tuple(range(min(self.link, piece.tokens))) if i else () for i, piece in enumerate(pieces))
        everything = super().plan(pieces, queries)
        return replace(everything, recompute=(tokens,) * self.layers, one_pass=True)
