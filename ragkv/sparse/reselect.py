"""LoopServe's decoding: every few tokens, the last of them select anew which keys are read.

Paper: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv 2507.13681),
algorithm 3, Eq. 7. Its prefill half is `loopserve.py`.

    n_o           steps before this one; step 0 produces the answer's first token
    n_d           steps between two selections
    observed      the last n_d tokens, including the token of this step; they come from question and answer alike
    sums [H, m]   attention of the observed rows, summed over rows and over the query heads of a kv head (Eq. 7)
    slots [H, .]  rows of the cache with the best B sums, and those of the observed tokens
    lines         V, S: vertical and slash lines that the prefills of all turns so far selected (algorithm 1, line 7)

A step reads the selected keys and the keys on the lines (algorithm 3, line 8). The token of the step is the next row of
the attention matrix: a vertical line c gives the key at position c, a slash line o the key at position n - o. Rows that
are appended after a selection are always read, until the next selection. A selection is made at n_o = first,
first + n_d, first + 2 n_d, ..., before the step reads. Until the first one, a step reads the lines and the answer so
far. Where there are no lines it is dense.

Differs from the paper:

- The paper only asks for (n_o - 16) mod n_d = 0. With n_d = 16 this holds at n_o = 0 already, when there is nothing to
  observe; here, n_o >= first is required, too. A selection reads the keys of all candidates and is counted so.
- The query heads of a group read the lines of the whole group (paper silent on grouped heads).
- An attention head that read everything in its prefill has no lines. Its kv head is dense until the first selection.
- The lines are those of prefills under `loopserve`. A turn whose question another policy read, or none, has no lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.kernels.attention import attend, merge
from ragkv.sparse.attention import attend_heads, score_dtype
from ragkv.sparse.base import DecodePolicy, DecodeState
from ragkv.sparse.loopserve import LoopServeState, PassLines
from ragkv.sparse.prefill import PrefillState


@dataclass(frozen=True)
class LoopServeDecode(DecodePolicy):
    """Parameters.

    Attributes:
        first: Steps before the first selection (paper: 16).
        every: Steps between selections, and tokens that select: the paper's n_d (paper: 16).
        budget: Keys selected, the paper's B (paper: 1024). It is per kv head (paper silent) and does not count the
            observed tokens and later ones (paper silent).
        evict: `view` selects from all keys each time. `evict` selects from the keys that are left, so that a key that
            was dropped once is never read again (paper silent).
        most: Largest share of the candidates that the budget may cover (paper silent). Below 1 the policy leaves
            something out of short contexts, too.
        lines: Whether lines that prefills selected are read.
    """

    first: int = 16
    every: int = 16
    budget: int = 1024
    evict: Literal["view", "evict"] = "view"
    most: float = 1.0
    lines: bool = True

    def __post_init__(self) -> None:
        if self.first < 0 or self.every < 1 or self.budget < 0:
            raise ValueError("every must be at least 1, first and budget not negative")
        if self.evict not in ("view", "evict"):
            raise ValueError("evict must be 'view' or 'evict'")
        if not 0 < self.most <= 1:
            raise ValueError("most must be above 0 and at most 1")

    def start(self) -> LoopServeDecodeState:
        """Create the state of one request."""
        return LoopServeDecodeState(self)


@dataclass
class SelectedKeys:
    """What one layer reads since its last selection.

    Attributes:
        slots: Rows of the cache [Hkv, m].
        k: Their keys [Hkv, m, d].
        v: Their values [Hkv, m, d].
        since: First row appended after the selection. All rows from there on are read, too.
    """

    slots: Tensor
    k: Tensor
    v: Tensor
    since: int


@dataclass(frozen=True)
class TurnLines:
    """The lines of all turns in one layer, for each kv head those of its group of query heads.

    Attributes:
        vertical: [Hkv, P] bool, by position.
        slash: [Hkv, P] bool, by distance.
        unlimited: [Hkv] bool. Heads whose group did not select lines for all its query heads in the present turn.
    """

    vertical: Tensor
    slash: Tensor
    unlimited: Tensor

    def on_lines(self, k_pos: Tensor, now: int) -> Tensor:
        """Mark the keys at positions k_pos [n] that are on a line for a row at position `now`: bool [Hkv, n]."""
        width = self.vertical.shape[1]
        distance = now - k_pos
        in_columns = self.vertical[:, k_pos.clamp(max=width - 1)] & (k_pos < width)
        on_slashes = self.slash[:, distance.clamp(max=width - 1)] & (distance < width)
        return in_columns | on_slashes


class LoopServeDecodeState(DecodeState):
    """State of one request.

    Attributes:
        params: The parameters.
        selected: The last selection, by layer. Before the first one it holds no slots, and only where there are lines.
        lines: The lines that a step reads, by layer.
        selection_steps: The steps at which a selection was made, by layer.
    """

    name = "loopserve"

    def __init__(self, params: LoopServeDecode):
        super().__init__()
        self.params, self.query_rows = params, params.every
        self.read_all = f"its first {params.first} steps are dense, and the answer has no more"
        self.selected: dict[int, SelectedKeys] = {}
        self.lines: dict[int, TurnLines] = {}
        self.selection_steps: dict[int, list[int]] = {}
        self._steps: dict[int, int] = {}
        self._queries: dict[int, tuple[Tensor, Tensor]] = {}
        self._prefill: LoopServeState | None = None

    @property
    def has_selected(self) -> bool:
        """Whether a selection was made or lines are read; until then every step reads every key."""
        return bool(self.selected)

    def use_prefill(self, prefill: PrefillState) -> None:
        """Read the lines of a prefill under LoopServe, and of the turns before it."""
        if self.params.lines and isinstance(prefill, LoopServeState):
            self._prefill = prefill

    def learn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> None:
        """Store the last queries."""
        if layer in self._queries:
            q, q_pos = (torch.cat(both) for both in zip(self._queries[layer], (q, q_pos), strict=True))
        every = self.params.every
        self._queries[layer] = q[-every:], q_pos[-every:]

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `DecodeState.step`."""
        p, (rows, heads), now = self.params, k.shape[:2], int(k_pos[-1])
        self.learn(layer, q[None], k, v, k_pos[-1:], k_pos, scale=scale)
        number = self._steps.get(layer, 0)
        self._steps[layer] = number + 1
        if number == 0 and self._prefill is not None:
            self._start_lines(layer, self._prefill.lines.get(layer, ()), k, now)
        scored = 0
        if number >= p.first and (number - p.first) % p.every == 0:
            self.selection_steps.setdefault(layer, []).append(number)
            self.read_all = "its budget covers the context"
            scored = self._select(layer, k, v, k_pos, scale=scale)
        if layer not in self.selected:
            out = attend(q[None], k, v, k_pos[-1:], k_pos, scale=scale)[0]
            return out, torch.full((heads,), rows, device=k.device)
        selected, queries = self.selected[layer], q.unflatten(0, (heads, -1)).to(score_dtype(q.dtype))
        later = (x[selected.since :].transpose(0, 1) for x in (k, v))
        parts = [attend_heads(queries, *part, scale=scale) for part in ((selected.k, selected.v), tuple(later))]
        read = torch.full((heads,), selected.slots.shape[1] + rows - selected.since, device=k.device)
        if layer in self.lines:
            marked = self._on_lines(layer, k_pos.to(k.device), now, first=number < p.first)
            parts.append(attend_marked(queries, k, v, marked, scale=scale))
            read += marked.sum(1)
        return merge(parts)[0].flatten(0, 1).to(q.dtype), read.clamp(min=scored)

    def _start_lines(self, layer: int, passes: Sequence[PassLines], k: Tensor, now: int) -> None:
        """Collect the lines of the turns so far; without any in the present turn, steps are dense until a selection."""
        rows, heads = k.shape[:2]
        lines = turn_lines(passes, heads, now)
        if lines is None:
            return
        self.lines[layer] = lines
        if not bool(lines.unlimited.all()):
            self.read_all = "the lines of its prefill cover the context"
            slots, nothing = (
                torch.zeros(heads, 0, dtype=torch.int64, device=k.device),
                k.new_zeros(heads, 0, k.shape[2]),
            )
            self.selected[layer] = SelectedKeys(slots, nothing, nothing, rows - 1)

    def _on_lines(self, layer: int, k_pos: Tensor, now: int, *, first: bool) -> Tensor:
        """Mark the rows [Hkv, n] of the cache that a step reads for its lines, besides the selected and later ones."""
        lines, selected = self.lines[layer], self.selected[layer]
        marked = lines.on_lines(k_pos, now)
        if first:
            marked |= lines.unlimited[:, None]
        marked[:, selected.since :] = False
        return marked.scatter_(1, selected.slots, False)

    def _select(self, layer: int, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float) -> int:
        """Select what is read from now on. Returns the number of candidates per kv head."""
        p, (rows, heads), previous = self.params, k.shape[:2], self.selected.get(layer)
        slots = torch.arange(rows, device=k.device).expand(heads, -1)
        keys = k.transpose(0, 1)
        if previous is not None and p.evict == "evict" and len(self.selection_steps[layer]) > 1:
            slots = torch.cat([previous.slots, slots[:, previous.since :]], dim=1)
            keys = torch.cat([previous.k, keys[:, previous.since :]], dim=1)
        q, q_pos = self._queries[layer]
        positions = k_pos.to(k.device)[slots]
        sums = attention_sums(q, keys, q_pos.to(k.device), positions, scale=scale)
        observed = positions >= int(q_pos[0])
        sums = sums.masked_fill(observed, float("inf"))  # always selected, besides the budget
        certain = int(observed[0].sum())
        budget = min(p.budget, math.ceil(p.most * (sums.shape[1] - certain)))
        count = min(sums.shape[1], budget + certain)
        best = sums.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
        slots = slots.gather(1, best)
        every_head = torch.arange(heads, device=k.device)[:, None]
        self.selected[layer] = SelectedKeys(slots, k[slots, every_head], v[slots, every_head], rows)
        return sums.shape[1]


def turn_lines(passes: Sequence[PassLines], heads: int, now: int) -> TurnLines | None:
    """Return the lines of all passes for `heads` kv heads and rows from position `now` on; None if there are none."""
    if not any(each.vertical.numel() or each.slash.numel() for each in passes):
        return None
    latest = passes[-1]
    width, group = 1 + max(each.last for each in passes), latest.unlimited.shape[0] // heads
    marks = torch.zeros(2, heads, width, dtype=torch.bool, device=latest.unlimited.device)
    for layer_pass in passes:
        for mark, (head, line) in zip(marks, (layer_pass.vertical.long(), layer_pass.slash.long()), strict=True):
            mark[head // group, line] = True
    unlimited = latest.unlimited.view(heads, group).any(1)
    return TurnLines(marks[0], marks[1], unlimited if latest.last == now - 1 else torch.ones_like(unlimited))


def attend_marked(q: Tensor, k: Tensor, v: Tensor, marked: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with one token q [Hkv, g, d] to the marked rows [Hkv, n] of k, v [n, Hkv, d], each kv head to its own.

    Returns:
        The output [Hkv, g, d] and its log-sum-exp [Hkv, g], which is -inf for a head without marked rows.
    """
    outs, sums = torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)
    for head, mark in enumerate(marked):
        rows = mark.nonzero()[:, 0]
        if len(rows):
            part = (x[rows, head][None] for x in (k, v))
            outs[head : head + 1], sums[head : head + 1] = attend_heads(q[head : head + 1], *part, scale=scale)
    return outs, sums


def attention_sums(q: Tensor, keys: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """Sum the attention of rows over the rows and over the query heads of each kv head (Eq. 7).

    Args:
        q: Queries [T, Hq, d].
        keys: Keys [Hkv, m, d].
        q_pos: Positions [T] of the queries. A row attends to no key with a later position.
        k_pos: Positions [Hkv, m] of the keys.
        scale: Softmax scale.

    Returns:
        [Hkv, m].
    """
    queries = q.unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3).to(score_dtype(q.dtype))
    scores = queries @ keys.to(queries.dtype).mT[:, None] * scale
    hidden = k_pos[:, None, None, :] > q_pos[:, None]
    sums: Tensor = scores.masked_fill_(hidden, float("-inf")).softmax(-1).sum((1, 2))  # Eq. 7
    return sums
