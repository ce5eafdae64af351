"""Chance: as many blocks as Scout would keep, drawn at random. Every selection has to beat this baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.recompute.base import Blocks
from ragkv.recompute.scout import Scout


@dataclass(frozen=True)
class Chance(Scout):
    """Parameters: those of Scout, and one more.

    Attributes:
        seed: Seed of the draw, the same for every question.
    """

    seed: int = 0

    def select_blocks(
        self, sizes: Sequence[int], logits: Tensor, cap: float, promise: float, read: Sequence[Blocks] = ()
    ) -> tuple[Blocks, ...]:
        """Select blocks as Scout does, after a random permutation of the logits."""
        order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(self.seed))
        return super().select_blocks(sizes, logits[order], cap, promise, read)
