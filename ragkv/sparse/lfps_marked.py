"""The candidates of one token under LFPS, as they are marked before its query exists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.sparse.indexing import true_indices


@dataclass(frozen=True)
class Marked:
    """The candidates of one token.

    Attributes:
        now: Position of the token.
        row: Its row in the cache.
        positions: Positions [m], row of the tables after row, ascending in each.
        slots: Their rows in the cache [m].
        starts: Where each row of the tables starts [H + 1].
        recent: The last positions before the token.
    """

    now: int
    row: int
    positions: Tensor
    slots: Tensor
    starts: Tensor
    recent: Tensor

    @property
    def counts(self) -> Tensor:
        """Candidates of each row of the tables [H]."""
        return self.starts.diff()

    def counts_before(self, first: int) -> Tensor:
        """Count the candidates of each row of the tables [H] that are before position `first`."""
        before = (self.positions < first).cumsum(0)
        return torch.cat([before.new_zeros(1), before])[self.starts].diff()

    def of_rows(self, busy: Tensor) -> Marked:
        """Return the candidates of the rows of the tables that are busy [H]."""
        if bool(busy.all()):
            return self
        counts = self.counts * busy
        kept = true_indices(busy.repeat_interleave(self.counts))
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        positions, slots = self.positions.index_select(0, kept), self.slots.index_select(0, kept)
        return replace(self, positions=positions, slots=slots, starts=starts)
