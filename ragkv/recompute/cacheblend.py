"""CacheBlend (Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", 2025).

Every block is kept. Layers up to a check layer are computed for all tokens; there the tokens whose new K, V differ most
from the stored ones (HKVD tokens) are chosen, and only they go on: deviation in one layer tells that of the next. The
first chunk after a shared prefix is exact and never chosen.

Differences from the published code: the mask is exact by position (there, scattered rows see too much), and both K and
V count (there V only; the paper speaks of KV).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ragkv.recompute.base import Piece, Plan, Refinement, Rows, outside, within
from ragkv.recompute.reuse import Reuse


@dataclass(frozen=True)
class CacheBlend(Reuse):
    """layers: of the model · ratio: tokens recomputed in the layers after the check, of all (paper: 5 to 18%) · layer:
    that checks, 0-based; layer 0 cannot, its K and V know no context · deviation: of which rows · gradual: ratios of
    the check layer and of those after it, before `ratio` holds; the paper filters so but gives no schedule (paper
    silent)."""

    ratio: float = 0.15
    layer: int = 1
    deviation: Literal["kv", "k", "v"] = "kv"
    gradual: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        within(0, self.layers - 1 - len(self.gradual), layer=self.layer)
        within(0, 1, ratio=self.ratio)
        for ratio in self.gradual:
            within(0, 1, gradual=ratio)

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Plan:
        """Every block; recomputation begins with every token that is not exact."""
        everything = super().plan(pieces, queries)
        check = Refinement(self.layer, (*self.gradual, self.ratio), self._apart)
        return replace(everything, recompute=(outside(pieces, everything.kept[0]),) * self.layers, refinement=check)

    def _apart(self, new: Rows, old: Rows) -> Tensor:
        """Squared differences, summed over attention heads."""
        k, v = ((a.float() - b.float()).square().sum((1, 2)) for a, b in zip(new, old, strict=True))
        return {"kv": k + v, "k": k, "v": v}[self.deviation]
