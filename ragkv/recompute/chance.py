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
        self,
        pieces: Sequence[Piece],
        masses: Sequence[Sequence[float]],
        cap: float,
        read: Sequence[Blocks] = (),
    ) -> tuple[Blocks, ...]:
        """Select blocks as Scout does, after a random permutation of the scores."""
        places = [(i, b) for i, piece in enumerate(pieces) for b in range(piece.blocks)]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(self.seed)).tolist()
        shuffled = [list(row) for row in masses]
        for (i, b), other in zip(places, order, strict=True):
            j, c = places[other]
            shuffled[i][b] = masses[j][c]
        return super().select_blocks(pieces, shuffled, cap, read)
