"""What one layer of a request stores for LFPS: two decaying score tables, and the cache row of every position.

A table has a row per attention head and a score at every index. It is stored divided by a factor per row: scores =
scale · raw. Decay is then one multiplication of the factor, and raw values only grow. This helps twice. The peak of a
run of indices is updated by a comparison with what is added, and a search for high scores visits only runs whose peak
is high. Sums of powers, in float64, are updated with what is added, so mean, deviation and kurtosis cost nothing per
index. Before a factor gets too small, the raw values are rescaled.

No step passes over a whole table. At 64k keys and 32 attention heads, two tables take 16 MB, and a few passes over them
would cost more than reading the keys that they name.

The vertical table is indexed by position. The slash table is stored backwards, offset o at index room - 1 - o. At every
step, its indices are positions moved by one number, `room - 1 - now`, and no table is shifted when a token is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.sparse.indexing import rows_of, true_indices
from ragkv.sparse.lfps_marked import Marked

SHIFT = 4
RUN = 1 << SHIFT
"""Indices under one peak. A table's room is a multiple of it."""
SMALLEST = 1e-6
"""A factor below this is multiplied into the raw values, after some 270 steps at .95 a step."""
MARGIN = 64
"""Indices behind the last position that score 0 (in the slash table: before the largest offset). A key's neighbours are
looked up without a bounds check: beyond the end of a row lies the margin of the next one."""


@dataclass(frozen=True)
class TableMoments:
    """Moments of a table's raw values, each [H] float64."""

    mean: Tensor
    deviation: Tensor
    kurtosis: Tensor


class ScoreTable:
    """A decaying table of scores. An index that was never added to scores 0.

    Attributes:
        raw: Stored values [H, room].
        scale: Factor per row [H] float64.
    """

    def __init__(self, scores: Tensor):
        """Create a table from scores [H, room], which must not be negative."""
        self.raw = scores
        self.scale = torch.ones(scores.shape[0], dtype=torch.float64, device=scores.device)
        self._peaks, self._sums = self._peaks_and_sums()

    @property
    def scores(self) -> Tensor:
        """The scores [H, room]."""
        return (self.scale[:, None] * self.raw).to(self.raw.dtype)

    def widen(self, extra: int, front: bool) -> None:
        """Add room for `extra` more indices, a multiple of RUN, at the front or at the back."""
        before, behind = (extra, 0) if front else (0, extra)
        self.raw = torch.nn.functional.pad(self.raw, (before, behind))
        self._peaks = torch.nn.functional.pad(self._peaks, (before // RUN, behind // RUN))

    def decay(self, factors: Tensor) -> None:
        """Multiply the scores of each row by factors [H]."""
        self.scale = self.scale * factors
        if bool((self.scale < SMALLEST).any()):
            self.raw = self.scores
            self.scale = torch.ones_like(self.scale)
            self._peaks, self._sums = self._peaks_and_sums()

    def add(self, indices: Tensor, scores: Tensor) -> None:
        """Add scores at indices.

        Args:
            indices: [H, m], distinct within their row where the score is not 0.
            scores: [H, m], not negative.
        """
        rows, room = self.raw.shape
        flat = (torch.arange(rows, device=indices.device)[:, None] * room + indices).flatten()
        old = self.raw.view(-1).index_select(0, flat).view(scores.shape)
        new = old + scores / self.scale[:, None].to(old.dtype)
        self.raw.view(-1).index_copy_(0, flat, new.flatten())
        self._peaks.view(-1).scatter_reduce_(0, flat >> SHIFT, new.flatten(), "amax")
        self._sums += _power_sums(new) - _power_sums(old)

    def moments(self, count: int) -> TableMoments:
        """Compute moments over `count` indices. Indices that were never added to count as 0."""
        first, second, third, fourth = self._sums / count
        variance = (second - first**2).clamp(min=0)
        central = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4).clamp(min=0)
        # The kurtosis of a flat table is undefined; 1 is the smallest possible value.
        flat = variance <= 1e-12 * first**2
        kurtosis = torch.where(flat, 1.0, central / torch.where(flat, 1.0, variance) ** 2)
        return TableMoments(first, variance.sqrt(), kurtosis.clamp(min=1.0))

    def runs_above(self, bar: Tensor) -> tuple[Tensor, Tensor]:
        """Find raw values above bar [H].

        Returns:
            Runs [m] int64, numbered through all rows, and which of their values are above the bar: bool [m, RUN].
        """
        bar = bar.to(self.raw.dtype)
        runs = true_indices((self._peaks > bar[:, None]).flatten())
        values = self.raw.view(-1, RUN).index_select(0, runs)
        return runs, values > bar.index_select(0, rows_of(runs, *self._peaks.shape)[0])[:, None]

    def _peaks_and_sums(self) -> tuple[Tensor, Tensor]:
        return self.raw.unflatten(1, (-1, RUN)).amax(-1), _power_sums(self.raw)


def _power_sums(values: Tensor) -> Tensor:
    """Compute the sums [4, H] float64 of the first four powers of values [H, m]."""
    x = values.double()
    square = x * x
    return torch.stack([x.sum(-1), square.sum(-1), _dot(square, x), _dot(square, square)])


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] @ y[..., None]).flatten()


@dataclass(frozen=True)
class PromptStatistics:
    """What the keys and values of a prompt without its sinks are like in the mean.

    Attributes:
        mean_key: [Hkv, d].
        mean_value: [Hkv, d].
        score_variance: Variance of the last query's scores, divided by its squared norm [Hkv, g].
    """

    mean_key: Tensor
    mean_value: Tensor
    score_variance: Tensor


class KeyScores:
    """Both score tables of one layer, and the cache row of every position.

    H is the number of query heads or of kv heads.

    Attributes:
        vertical: S_v [H, room], by position.
        slash: S_s [H, room], by offset, backwards.
        slot: Cache row by position [room] int64; -1 for gaps and sinks.
        sinks: Cache rows of the sinks [s].
        recent: The last positions, ascending.
        scored: Number of rows that are not sinks.
        statistics: Statistics of the prompt; None if it has only sinks.
    """

    def __init__(
        self,
        vertical: Tensor,
        slash: Tensor,
        positions: Tensor,
        sinks: Tensor,
        local: int,
        statistics: PromptStatistics | None,
    ):
        """Create the tables from a prompt.

        Args:
            vertical: Scores [H, P] by position.
            slash: Scores [H, P] by offset.
            positions: Positions [n] of the cache's rows.
            sinks: Cache rows of the sinks.
            local: How many positions are recent.
            statistics: Statistics of the prompt.

        Raises:
            ValueError: Two rows share a position.
        """
        room = room_for(vertical.shape[1])
        missing = room - vertical.shape[1]
        self.vertical = ScoreTable(torch.nn.functional.pad(vertical, (0, missing)))
        self.slash = ScoreTable(torch.nn.functional.pad(slash.flip(-1), (missing, 0)))
        self.slot = torch.full((room,), -1, dtype=torch.int64, device=positions.device)
        self.slot[positions] = torch.arange(len(positions), device=positions.device)
        if int((self.slot >= 0).sum()) != len(positions):
            raise ValueError("two rows of the cache have one position; LFPS cannot read such a cache")
        self.slot[positions[sinks]] = -1
        self.sinks, self.recent = sinks, positions.sort().values[-local:]
        self.scored, self.statistics = len(positions) - len(sinks), statistics
        self._local = local
        self._allocate_marks()

    @property
    def room(self) -> int:
        """The number of positions that fit."""
        return self.slot.shape[0]

    def append_token(self, now: int, row: int) -> None:
        """Add the token at position `now`, after all others, in cache row `row`. It scores 0 in both tables."""
        if now + MARGIN > self.room:
            extra = room_for(now) - self.room
            self.slot = torch.nn.functional.pad(self.slot, (0, extra), value=-1)
            self.vertical.widen(extra, front=False)
            self.slash.widen(extra, front=True)
            self._allocate_marks()
        self.slot[now] = row
        self.recent = torch.cat([self.recent, self.recent.new_tensor([now])])[-self._local :]
        self.scored += 1

    def decay(self, factors: Tensor) -> None:
        """Decay both tables, each row by factors [H]."""
        self.vertical.decay(factors)
        self.slash.decay(factors)

    def add_scores(self, positions: Tensor, scores: Tensor, now: int) -> None:
        """Add scores [H, m] at positions [H, m], -1 for none, to both tables. `now` is the query's position."""
        none = positions < 0
        self.vertical.add(positions.masked_fill(none, self.room - 1), scores)
        self.slash.add((positions + (self.room - 1 - now)).masked_fill(none, 0), scores)

    def drop_token(self, marked: Marked) -> None:
        """Take back the token that was appended for `marked`; it was the last one, and nothing was added since."""
        self.slot[marked.now] = -1
        self.recent = marked.recent
        self.scored -= 1

    def mark_all(self, now: int) -> None:
        """Mark every position up to `now`."""
        self._marks[:, : now + 1] = True

    def mark_recent(self) -> None:
        """Mark the last positions."""
        self._marks[:, self.recent] = True

    def mark_above(self, tau_v: Tensor, tau_s: Tensor, now: int) -> None:
        """Mark positions that score above tau [H] (in raw units) in either table, seen from `now`."""
        runs, high = self.vertical.runs_above(tau_v)
        self._marks.view(-1, RUN).index_copy_(0, runs, high)
        runs, high = self.slash.runs_above(tau_s)
        shift = self.room - 1 - now
        # Convert runs to positions: move by whole runs, and by the remainder with a view that starts further left.
        view = self._buffer[RUN - shift % RUN :][: self._marks.numel()].view(-1, RUN)
        runs = runs - shift // RUN
        view.index_copy_(0, runs, high | view.index_select(0, runs))

    def mark_neighbours(self, reach: tuple[int, ...], mean_v: Tensor, mean_s: Tensor, now: int) -> None:
        """Mark the neighbours of marked positions that score above the mean [H] (in raw units) of either table."""
        marks, shift = self._marks.view(-1), self.room - 1 - now
        marked = true_indices(marks)
        row, _ = rows_of(marked, *self._marks.shape)
        tables = self.vertical.raw.view(-1), self.slash.raw.view(-1)
        means = [mean.to(tables[0].dtype).index_select(0, row) for mean in (mean_v, mean_s)]
        last = len(marks) - 1
        for offset in reach:
            near = (marked + offset).clamp_(0, last)
            above = tables[0].index_select(0, near) > means[0]
            above |= tables[1].index_select(0, (near + shift).clamp_(max=last)) > means[1]
            # If the neighbour is not above, the marked position is marked again.
            marks.index_fill_(0, marked + offset * above, True)

    def pop_marked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the marked positions that have a slot, and clear the marks.

        Returns:
            Positions [m] and slots [m], row after row and ascending in each, and where each row starts [H + 1].
        """
        marks = self._marks.view(-1)
        marked = true_indices(marks)
        marks.index_fill_(0, marked, False)
        row, starts = rows_of(marked, *self._marks.shape)
        positions = marked - row * self.room
        slots = self.slot.index_select(0, positions)
        if bool((slots < 0).any()):
            present = true_indices(slots >= 0)
            positions, slots = positions.index_select(0, present), slots.index_select(0, present)
            starts = torch.searchsorted(present, starts)
        return positions, slots, starts

    def move(self, device: torch.device) -> None:
        """Move tables and rows to a device. What is known of the prompt stays: only bypassing asks for it."""
        for part in (self, self.vertical, self.slash):
            part.__dict__.update({name: x.to(device) for name, x in vars(part).items() if isinstance(x, Tensor)})
        self._allocate_marks()

    def _allocate_marks(self) -> None:
        """Allocate the marks of candidates: bool [H, room], in a buffer that starts RUN earlier.

        Between steps nothing is marked, and no step allocates marks.
        """
        rows = self.vertical.raw.shape[0]
        self._buffer = torch.zeros(RUN + rows * self.room, dtype=torch.bool, device=self.slot.device)
        self._marks = self._buffer[RUN:].view(rows, self.room)


def room_for(now: int) -> int:
    """Return the room for positions 0 .. now, a margin, and a sixteenth as many to come: a multiple of RUN."""
    return -(-(now + MARGIN + max(MARGIN, now // 16)) // RUN) * RUN
