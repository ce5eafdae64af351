"""Chance: as many blocks as Scout would keep, drawn at random. Every selection has to beat this baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragkv.recompute.base import Blocks, Piece
from ragkv.recompute.scout import Scout


@dataclass(frozen=True)
class Chance(Scout):
    """Parameters: those of Scout, and one more.

    Attributes:
        seed: Seed of the draw, the same for every question.
    """

    seed: int = 0

    def select_blocks(
        self, pieces: Sequence[Piece], fixed: Sequence[Blocks], masses: Sequence[Sequence[float]]
    ) -> list[Blocks]:
        """Select blocks as Scout does, after a random permutation of the scores."""
        free = [(i, b) for i, piece in enumerate(pieces) for b in range(piece.blocks) if b not in fixed[i]]
        order = torch.randperm(len(free), generator=torch.Generator().manual_seed(self.seed)).tolist()
        shuffled = [list(row) for row in masses]
        for (i, b), other in zip(free, order, strict=True):
            j, c = free[other]
            shuffled[i][b] = masses[j][c]
        return super().select_blocks(pieces, fixed, shuffled)
