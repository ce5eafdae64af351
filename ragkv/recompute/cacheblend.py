"""CacheBlend (Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", 2025).

Every block is kept. Layers up to a check layer are recomputed for all tokens. The check layer chooses the tokens whose
new K and V differ most from the stored ones (HKVD tokens), and later layers recompute only these: the deviation in one
layer predicts that in the next. The first chunk after a shared prefix is exact and never chosen.

Differs from the published code: the mask is exact by position (there, scattered rows see too much), and both K and V
count (there, only V; the paper speaks of KV).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ragkv.recompute.base import Blocks, Piece, Plan, Refinement, Rows, inexact_tokens, require_between
from ragkv.recompute.reuse import Reuse


@dataclass(frozen=True)
class CacheBlend(Reuse):
    """Parameters.

    Attributes:
        layers: Layers of the model.
        ratio: Tokens recomputed in the layers after the check, as a share of all (paper: 5 to 18%).
        layer: Check layer, 0-based. It cannot be layer 0, whose K and V do not depend on the context.
        deviation: Rows whose difference counts.
        gradual: Ratios of the check layer and of the layers after it, before `ratio` holds. The paper filters this way
            but gives no schedule (paper silent).
    """

    ratio: float = 0.15
    layer: int = 1
    deviation: Literal["kv", "k", "v"] = "kv"
    gradual: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_between(0, self.layers - 1 - len(self.gradual), layer=self.layer)
        require_between(0, 1, ratio=self.ratio)
        for ratio in self.gradual:
            require_between(0, 1, gradual=ratio)

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Keep every block. Recomputation begins with every token that is not exact."""
        everything = super().plan(pieces, queries)
        check = Refinement(self.layer, (*self.gradual, self.ratio), self._difference)
        recompute = (inexact_tokens(pieces, everything.kept[0]),) * self.layers
        return replace(everything, recompute=recompute, refinement=check)

    def _difference(self, new: Rows, old: Rows) -> Tensor:
        """Compute squared differences, summed over attention heads."""
        k, v = ((a.float() - b.float()).square().sum((1, 2)) for a, b in zip(new, old, strict=True))
        return {"kv": k + v, "k": k, "v": v}[self.deviation]
