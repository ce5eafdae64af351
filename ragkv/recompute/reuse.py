"""Reuse: concatenate the stored caches and repair nothing. The lower baseline, in both readings (paper silent)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ragkv.recompute.base import Blocks, ChunkSpan, Piece, Plan


@dataclass(frozen=True)
class Reuse:
    """Keys are turned to where their chunk stands now. layers: of the model."""

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


@dataclass(frozen=True)
class ReuseEncoded(Reuse):
    """Keys of every chunk stand where those of the first one do, right after S, all chunks upon one another: SamKV's
    catastrophic baseline."""

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Plan:
        """Every block, no recomputation, no turning."""
        return replace(super().plan(pieces, queries), key_positions=_encoded)


def _encoded(tokens: Tensor, place: ChunkSpan) -> Tensor:
    return tokens + place.first
