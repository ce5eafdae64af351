"""Reuse: concatenate the stored caches and repair nothing. This is the lower baseline.

The paper does not say where the keys of a chunk are rotated to (paper silent); both readings are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ragkv.recompute.all_chunks import AllChunks
from ragkv.recompute.base import Blocks, ChunkSpan, Piece, Plan


@dataclass(frozen=True)
class Reuse(AllChunks):
    """Rotate keys to the positions that their chunk has in the context.

    Attributes:
        layers: Layers of the model.
    """

    layers: int

    def composite_blocks(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Return nothing: no query is needed."""
        return ()

    def composite_layers(self, layers: int) -> int:
        """Return 0: there is no composite pass."""
        return 0

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Keep every block and recompute nothing."""
        nothing: tuple[tuple[tuple[int, ...], ...], ...] = (((),) * len(pieces),) * self.layers
        return Plan((tuple(tuple(range(piece.blocks)) for piece in pieces),) * self.layers, nothing, nothing)


@dataclass(frozen=True)
class ReuseEncoded(Reuse):
    """Leave the keys of every chunk at the first chunk's positions, right after S. This is SamKV's catastrophic
    baseline: all chunks overlap."""

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Keep every block, recompute nothing and rotate nothing."""
        return replace(super().plan(pieces, queries), key_positions=_encoded)


def _encoded(tokens: Tensor, span: ChunkSpan) -> Tensor:
    return tokens + span.first
