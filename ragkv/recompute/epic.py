"""EPIC (Hu et al., "EPIC: Efficient Position-Independent Caching for Serving Large Language Models", 2024): LegoLink.

Every block is kept. The errors of a chunk that was encoded alone are concentrated in its first tokens: they attend only
to themselves and become an attention sink of their own. These few tokens are recomputed in every layer, over everything
before them. The first chunk needs no repair, since nothing precedes it that it has not seen.

SamKV's paper describes EPIC as updating the initial and the local positions of the context. LegoLink's local positions
are those of the question, which is computed with every method; the local tokens of chunks are recomputed with `local`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ragkv.recompute.base import Blocks, Piece, Plan, Tokens, require_between
from ragkv.recompute.reuse import Reuse


@dataclass(frozen=True)
class Epic(Reuse):
    """Parameters.

    Attributes:
        layers: Layers of the model.
        link: Tokens recomputed at the start of every chunk but the first. The paper tries 1 to 64.
        local: Tokens recomputed at the end of every chunk but the first (EPIC: none; SamKV names them and no number).
    """

    link: int = 32
    local: int = 0

    def __post_init__(self) -> None:
        require_between(0, math.inf, link=self.link, local=self.local)

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Keep every block and recompute the ends of every chunk but the first."""
        tokens = tuple(self._ends(piece.tokens) if i else () for i, piece in enumerate(pieces))
        everything = super().plan(pieces, queries)
        return replace(everything, recompute=(tokens,) * self.layers, one_pass=True)

    def _ends(self, tokens: int) -> Tokens:
        """Return the first `link` and the last `local` of a chunk's tokens."""
        return tuple(i for i in range(tokens) if i < self.link or i >= tokens - self.local)
