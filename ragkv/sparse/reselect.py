"""LoopServe's decoding: every few tokens, the last of them select anew which keys are read.

Paper: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv 2507.13681),
algorithm 3, Eq. 7. Its prefill half is `loopserve.py`.

    n_o           steps before this one; step 0 produces the answer's first token
    n_d           steps between two selections
    observed      the last n_d tokens, including the token of this step; they come from question and answer alike
    sums [H, m]   attention of the observed rows, summed over rows and over the query heads of a kv head (Eq. 7)
    slots [H, .]  rows of the cache with the best B sums, and those of the observed tokens

Steps n_o < first are dense. A selection is made at n_o = first, first + n_d, first + 2 n_d, ..., before the step reads.
Rows that are appended after a selection are always read, until the next selection.

Differs from the paper: the paper only asks for (n_o - 16) mod n_d = 0. With n_d = 16 this holds at n_o = 0 already,
when there is nothing to observe; here, n_o >= first is required, too. A selection reads the keys of all candidates and
is counted so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.kernels.attention import attend, merge
from ragkv.sparse.attention import attend_heads, score_dtype
from ragkv.sparse.base import DecodePolicy, DecodeState


@dataclass(frozen=True)
class LoopServeDecode(DecodePolicy):
    """Parameters.

    Attributes:
        first: Steps that are dense (paper: 16).
        every: Steps between selections, and tokens that select: the paper's n_d (paper: 16).
        budget: Keys selected, the paper's B (paper: 1024). It is per kv head (paper silent) and does not count the
            observed tokens and later ones (paper silent).
        evict: `view` selects from all keys each time. `evict` selects from the keys that are left, so that a key that
            was dropped once is never read again (paper silent).
        most: Largest share of the candidates that the budget may cover (paper silent). Below 1 the policy leaves
            something out of short contexts, too.
    """

    first: int = 16
    every: int = 16
    budget: int = 1024
    evict: Literal["view", "evict"] = "view"
    most: float = 1.0

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


class LoopServeDecodeState(DecodeState):
    """State of one request.

    Attributes:
        params: The parameters.
        selected: The last selection, by layer.
        selection_steps: The steps at which a selection was made, by layer.
    """

    name = "loopserve"

    def __init__(self, params: LoopServeDecode):
        super().__init__()
        self.params, self.query_rows = params, params.every
        self.read_all = f"its first {params.first} steps are dense, and the answer has no more"
        self.selected: dict[int, SelectedKeys] = {}
        self.selection_steps: dict[int, list[int]] = {}
        self._steps: dict[int, int] = {}
        self._queries: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def has_selected(self) -> bool:
        """Whether a selection was made; until then every step reads every key."""
        return bool(self.selection_steps)

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
        p, (rows, heads) = self.params, k.shape[:2]
        self.learn(layer, q[None], k, v, k_pos[-1:], k_pos, scale=scale)
        number = self._steps.get(layer, 0)
        self._steps[layer] = number + 1
        if number < p.first:
            out = attend(q[None], k, v, k_pos[-1:], k_pos, scale=scale)[0]
            return out, torch.full((heads,), rows, device=k.device)
        scored = 0
        if (number - p.first) % p.every == 0:
            self.selection_steps.setdefault(layer, []).append(number)
            self.read_all = "its budget covers the context"
            scored = self._select(layer, k, v, k_pos, scale=scale)
        selected, queries = self.selected[layer], q.unflatten(0, (heads, -1)).to(score_dtype(q.dtype))
        later = (x[selected.since :].transpose(0, 1) for x in (k, v))
        parts = (selected.k, selected.v), tuple(later)
        out = merge([attend_heads(queries, *part, scale=scale) for part in parts])[0]
        read = max(scored, selected.slots.shape[1] + rows - selected.since)
        return out.flatten(0, 1).to(q.dtype), torch.full((heads,), read, device=k.device)

    def _select(self, layer: int, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float) -> int:
        """Select what is read from now on. Returns the number of candidates per kv head."""
        p, (rows, heads), previous = self.params, k.shape[:2], self.selected.get(layer)
        slots = torch.arange(rows, device=k.device).expand(heads, -1)
        keys = k.transpose(0, 1)
        if previous is not None and p.evict == "evict":
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
