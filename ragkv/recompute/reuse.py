"""Reuse: concatenate the stored caches at their new positions and repair nothing. The lower baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ragkv.recompute.base import Blocks, Piece, Plan


@dataclass(frozen=True)
class Reuse:
    """layers: of the model."""

    layers: int

    def first(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """No query is needed."""
        return ()

    def depth(self, layers: int) -> int:
        """No composite pass."""
        return 0

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Plan:
        """Every block, no recomputation."""
        nothing: tuple[tuple[tuple[int, ...], ...], ...] = (((),) * len(pieces),) * self.layers
        return Plan((tuple(tuple(range(piece.blocks)) for piece in pieces),) * self.layers, nothing, nothing)
