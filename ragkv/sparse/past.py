"""What one layer of a request remembers for LFPS: two score tables that fade, and where keys lie.

A table has a row per attention head and a score at every index. It is stored divided by a factor per row, scores =
scale · raw. Fading is then one multiplication of the factor, and raw values only ever grow, which pays twice: the peak
of a run of indices is kept up by comparing with what is added, and a search for high scores looks only into runs whose
peak is high. Sums of powers, in float64, are kept up with what is added, so mean, deviation and kurtosis cost nothing
per index. Before a factor gets too small, all is scaled back.

No step passes over a whole table: at 64k keys and 32 attention heads two tables are 16 MB, and passing over them a few
times would cost more than reading the keys they name.

The vertical table is indexed by position. The slash table is stored backwards, offset o at index room - 1 - o: at
every step its indices are positions moved by one number, `room - 1 - now`, and no table is shifted when a token comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHIFT = 4
RUN = 1 << SHIFT
"""Indices under one peak. A table's room is a multiple of it."""
SMALLEST = 1e-6
"""A factor below this is multiplied into the raw values, some 270 steps at .95 a step."""
MARGIN = 64
"""Indices behind the last position that score 0 (in the slash table: before the largest offset), so that a key's
neighbours are looked up without asking whether they exist: beyond a row's ends lies its neighbour's margin."""


@dataclass(frozen=True)
class Moments:
    """mean, deviation, kurtosis [H] float64 of raw values over a number of places."""

    mean: Tensor
    deviation: Tensor
    kurtosis: Tensor


class Table:
    """raw [H, room] · scale [H] float64. An index that was never touched scores 0."""

    def __init__(self, scores: Tensor):
        """scores [H, room], not negative."""
        self.raw = scores
        self.scale = torch.ones(scores.shape[0], dtype=torch.float64, device=scores.device)
        self._peaks, self._sums = self._measured()

    @property
    def scores(self) -> Tensor:
        """[H, room]"""
        return (self.scale[:, None] * self.raw).to(self.raw.dtype)

    def widen(self, extra: int, front: bool) -> None:
        """Make room for `extra` more indices, a multiple of RUN, behind the others or before them."""
        before, behind = (extra, 0) if front else (0, extra)
        self.raw = torch.nn.functional.pad(self.raw, (before, behind))
        self._peaks = torch.nn.functional.pad(self._peaks, (before // RUN, behind // RUN))

    def fade(self, decay: Tensor) -> None:
        """Multiply the scores of each row by decay [H]."""
        self.scale = self.scale * decay
        if bool((self.scale < SMALLEST).any()):
            self.raw = self.scores
            self.scale = torch.ones_like(self.scale)
            self._peaks, self._sums = self._measured()

    def add(self, indices: Tensor, scores: Tensor) -> None:
        """Add scores [H, m], not negative, at indices [H, m], distinct in their row where the score is not 0."""
        rows, room = self.raw.shape
        flat = (torch.arange(rows, device=indices.device)[:, None] * room + indices).flatten()
        old = self.raw.view(-1).index_select(0, flat).view(scores.shape)
        new = old + scores / self.scale[:, None].to(old.dtype)
        self.raw.view(-1).index_copy_(0, flat, new.flatten())
        self._peaks.view(-1).scatter_reduce_(0, flat >> SHIFT, new.flatten(), "amax")
        self._sums += _powers(new) - _powers(old)

    def moments(self, places: int) -> Moments:
        """Over so many places; what was never touched counts as 0."""
        first, second, third, fourth = self._sums / places
        variance = (second - first**2).clamp(min=0)
        central = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4).clamp(min=0)
        # A flat table has no shape; 1 is the least kurtosis there is.
        flat = variance <= 1e-12 * first**2
        kurtosis = torch.where(flat, 1.0, central / torch.where(flat, 1.0, variance) ** 2)
        return Moments(first, variance.sqrt(), kurtosis.clamp(min=1.0))

    def above(self, bar: Tensor) -> tuple[Tensor, Tensor]:
        """Runs [m] int64, counted through all rows, and which of their values are above bar [H]: bool [m, RUN]."""
        bar = bar.to(self.raw.dtype)
        runs = true((self._peaks > bar[:, None]).flatten())
        values = self.raw.view(-1, RUN).index_select(0, runs)
        return runs, values > bar.index_select(0, rows_of(runs, *self._peaks.shape)[0])[:, None]

    def _measured(self) -> tuple[Tensor, Tensor]:
        return self.raw.unflatten(1, (-1, RUN)).amax(-1), _powers(self.raw)


def true(flags: Tensor) -> Tensor:
    """Indices [m] int64, ascending, of what is true in flags [n]; quick where that is little."""
    if len(flags) % 8 or flags.storage_offset() % 8:
        return flags.nonzero()[:, 0]
    words = flags.view(torch.int64).nonzero()[:, 0]
    found = flags.view(-1, 8).index_select(0, words).flatten().nonzero()[:, 0]
    return (words.index_select(0, found >> 3) << 3) + (found & 7)


def rows_of(flat: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Of ascending flat indices [m] into [rows, length]: their rows [m], and where each row's begin [rows + 1].

    Looked up by bisection: dividing every index takes longer than reading what it points at.
    """
    numbers = torch.arange(rows + 1, device=flat.device)
    starts = torch.searchsorted(flat, numbers * length)
    return numbers[:rows].repeat_interleave(starts.diff()), starts


def _powers(values: Tensor) -> Tensor:
    """Sums [4, H] float64 of the first four powers of values [H, m]."""
    x = values.double()
    square = x * x
    return torch.stack([x.sum(-1), square.sum(-1), _dot(square, x), _dot(square, square)])


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] @ y[..., None]).flatten()


@dataclass(frozen=True)
class Prior:
    """k, v [Hkv, d]: mean key and value of a prompt without its sinks · r [Hkv, g]: variance of its last query's
    scores, over that query's squared norm."""

    k: Tensor
    v: Tensor
    r: Tensor


class KeyTables:
    """vertical, slash [H, room]: S_v, S_s backwards, H = Hq or Hkv · slot [room] int64: row of the cache at a
    position, -1 for gaps and sinks · sinks [s]: rows of the sinks · recent: the last positions, ascending · others:
    rows that are no sinks · prior: what a prompt's keys are like in the mean, None where there are only sinks."""

    def __init__(
        self,
        vertical: Tensor,
        slash: Tensor,
        positions: Tensor,
        sinks: Tensor,
        local: int,
        prior: Prior | None,
    ):
        """vertical by position, slash by offset [H, P] · positions [n] of the cache's rows · local: how many
        positions are recent. Raises ValueError where two rows share a position."""
        room = room_for(vertical.shape[1])
        lacking = room - vertical.shape[1]
        self.vertical = Table(torch.nn.functional.pad(vertical, (0, lacking)))
        self.slash = Table(torch.nn.functional.pad(slash.flip(-1), (lacking, 0)))
        self.slot = torch.full((room,), -1, dtype=torch.int64, device=positions.device)
        self.slot[positions] = torch.arange(len(positions), device=positions.device)
        if int((self.slot >= 0).sum()) != len(positions):
            raise ValueError("two rows of the cache stand at one position; such a cache cannot be read by LFPS")
        self.slot[positions[sinks]] = -1
        self.sinks, self.recent = sinks, positions.sort().values[-local:]
        self.others, self.prior = len(positions) - len(sinks), prior
        self._local = local
        self._blank()

    @property
    def room(self) -> int:
        """Positions there is room for."""
        return self.slot.shape[0]

    def remember(self, now: int, row: int) -> None:
        """The token at position `now`, behind all others, has come in a row of the cache. It scores 0 in both
        tables."""
        if now + MARGIN > self.room:
            extra = room_for(now) - self.room
            self.slot = torch.nn.functional.pad(self.slot, (0, extra), value=-1)
            self.vertical.widen(extra, front=False)
            self.slash.widen(extra, front=True)
            self._blank()
        self.slot[now] = row
        self.recent = torch.cat([self.recent, self.recent.new_tensor([now])])[-self._local :]
        self.others += 1

    def fade(self, decay: Tensor) -> None:
        """Both tables, each row by decay [H]."""
        self.vertical.fade(decay)
        self.slash.fade(decay)

    def learn(self, places: Tensor, scores: Tensor, now: int) -> None:
        """Add scores [H, m] at positions [H, m], -1 for none, to both tables."""
        none = places < 0
        self.vertical.add(places.masked_fill(none, self.room - 1), scores)
        self.slash.add((places + (self.room - 1 - now)).masked_fill(none, 0), scores)

    def mark_all(self, now: int, busy: Tensor) -> None:
        """Every position, in rows that are busy [H]."""
        self._marks[:, : now + 1] = busy[:, None]

    def mark_recent(self, busy: Tensor) -> None:
        """The last positions, in rows that are busy [H]."""
        self._marks[:, self.recent] |= busy[:, None]

    def mark(self, tau_v: Tensor, tau_s: Tensor, now: int) -> None:
        """Positions that score above tau [H] (raw units) in either table, seen from `now`."""
        runs, high = self.vertical.above(tau_v)
        self._marks.view(-1, RUN).index_copy_(0, runs, high)
        runs, high = self.slash.above(tau_s)
        shift = self.room - 1 - now
        # The same runs by position: whole runs further left, then rows of a view that starts the rest of the way left.
        view = self._buffer[RUN - shift % RUN :][: self._marks.numel()].view(-1, RUN)
        runs = runs - shift // RUN
        view.index_copy_(0, runs, high | view.index_select(0, runs))

    def mark_near(self, reach: tuple[int, ...], mean_v: Tensor, mean_s: Tensor, now: int) -> None:
        """Neighbours of what is marked, where they score above the mean [H] (raw units) of either table."""
        marks, shift = self._marks.view(-1), self.room - 1 - now
        marked = true(marks)
        row, _ = rows_of(marked, *self._marks.shape)
        tables = self.vertical.raw.view(-1), self.slash.raw.view(-1)
        means = [mean.to(tables[0].dtype).index_select(0, row) for mean in (mean_v, mean_s)]
        last = len(marks) - 1
        for offset in reach:
            near = (marked + offset).clamp_(0, last)
            liked = tables[0].index_select(0, near) > means[0]
            liked |= tables[1].index_select(0, (near + shift).clamp_(max=last)) > means[1]
            # Where the neighbour does not count, what is marked is marked once more.
            marks.index_fill_(0, marked + offset * liked, True)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [m] and slots [m] of what is marked and there, row after row, ascending in each, and where each row
        starts [H + 1]. The marks are gone then."""
        marks = self._marks.view(-1)
        marked = true(marks)
        marks.index_fill_(0, marked, False)
        row, starts = rows_of(marked, *self._marks.shape)
        places = marked - row * self.room
        slots = self.slot.index_select(0, places)
        if bool((slots < 0).any()):
            there = true(slots >= 0)
            places, slots = places.index_select(0, there), slots.index_select(0, there)
            starts = torch.searchsorted(there, starts)
        return places, slots, starts

    def _blank(self) -> None:
        """Candidates, bool [H, room] in a buffer that starts RUN earlier: between steps there are none, and nothing is
        allocated for them in one."""
        rows = self.vertical.raw.shape[0]
        self._buffer = torch.zeros(RUN + rows * self.room, dtype=torch.bool, device=self.slot.device)
        self._marks = self._buffer[RUN:].view(rows, self.room)


def room_for(now: int) -> int:
    """Room for positions 0 .. now, a margin, and a sixteenth as many to come; a multiple of RUN."""
    return -(-(now + MARGIN + max(MARGIN, now // 16)) // RUN) * RUN
