"""LoopServe's decoding: every few tokens the last of them choose anew which keys are read.

Paper: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv 2507.13681),
algorithm 3, Eq. 7. Its prefill half is `loopserve.py`.

    n_o           steps before this one; step 0 is the answer's first token
    n_d           steps between two selections
    observed      the last n_d tokens, the one of this step among them: question and answer alike
    scores [H, m] attention of the observed rows, summed over rows and over the query heads of a kv head (Eq. 7)
    kept [H, .]   rows of the cache with the best B scores, and those of the observed tokens

Steps n_o < first are dense. A selection is made at n_o = first, first + n_d, first + 2 n_d, …, before the step reads.
What comes after a selection is always read, until the next one.

The paper asks for (n_o - 16) mod n_d = 0 alone, which with n_d = 16 holds at n_o = 0 already, where there is nothing to
observe; n_o >= first is asked for, too. A selection reads the keys of all it chooses from, and is counted so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.kernels.attention import attend, merge
from ragkv.sparse.base import DecodePolicy, DecodeState, wide
from ragkv.sparse.psa import over


@dataclass(frozen=True)
class LoopServeDecode(DecodePolicy):
    """first: steps that are dense (paper: 16) · every: steps between selections, and tokens that choose, the paper's
    n_d (16) · budget: keys chosen, the paper's B (1024), per kv head (paper silent) beside those of the observed tokens
    and of later ones (paper silent) · evict: `view` chooses from all keys each time, `evict` from what is left, so that
    a key not chosen once is never read again (paper silent)."""

    first: int = 16
    every: int = 16
    budget: int = 1024
    evict: Literal["view", "evict"] = "view"

    def __post_init__(self) -> None:
        if self.first < 0 or self.every < 1 or self.budget < 0:
            raise ValueError("every must be at least 1, first and budget not negative")
        if self.evict not in ("view", "evict"):
            raise ValueError("evict must be 'view' or 'evict'")

    def start(self) -> ReselectingState:
        """State of one request."""
        return ReselectingState(self)


@dataclass
class KeptLines:
    """What one layer reads since its last selection: slots [Hkv, m], their k, v [Hkv, m, d], and all rows from slot
    `since` on."""

    slots: Tensor
    k: Tensor
    v: Tensor
    since: int


class ReselectingState(DecodeState):
    """State of one request, by layer. kept: of the last selection · chosen: the steps at which there was one."""

    def __init__(self, params: LoopServeDecode):
        super().__init__()
        self.params, self.rows = params, params.every
        self.kept: dict[int, KeptLines] = {}
        self.chosen: dict[int, list[int]] = {}
        self._steps: dict[int, int] = {}
        self._asked: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Keep the last queries."""
        if layer in self._asked:
            q, q_pos = (torch.cat(both) for both in zip(self._asked[layer], (q, q_pos), strict=True))
        every = self.params.every
        self._asked[layer] = q[-every:], q_pos[-every:]

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Decoding.step`."""
        p, (rows, heads) = self.params, k.shape[:2]
        self.observe(layer, q[None], k, v, k_pos[-1:], k_pos, scale=scale)
        number = self._steps.get(layer, 0)
        self._steps[layer] = number + 1
        if number < p.first:
            out = attend(q[None], k, v, k_pos[-1:], k_pos, scale=scale)[0]
            return out, torch.full((heads,), rows, device=k.device)
        scored = 0
        if (number - p.first) % p.every == 0:
            self.chosen.setdefault(layer, []).append(number)
            scored = self._select(layer, k, v, k_pos, scale=scale)
        kept, asked = self.kept[layer], q.unflatten(0, (heads, -1)).to(wide(q.dtype))
        later = (x[kept.since :].transpose(0, 1) for x in (k, v))
        out = merge([over(asked, kept.k, kept.v, scale=scale), over(asked, *later, scale=scale)])[0]
        read = max(scored, kept.slots.shape[1] + rows - kept.since)
        return out.flatten(0, 1).to(q.dtype), torch.full((heads,), read, device=k.device)

    def _select(self, layer: int, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float) -> int:
        """Choose what is read from now on; returns how many keys there were to choose from, per kv head."""
        p, (rows, heads), before = self.params, k.shape[:2], self.kept.get(layer)
        slots = torch.arange(rows, device=k.device).expand(heads, -1)
        keys = k.transpose(0, 1)
        if before is not None and p.evict == "evict":
            slots = torch.cat([before.slots, slots[:, before.since :]], dim=1)
            keys = torch.cat([before.k, keys[:, before.since :]], dim=1)
        q, q_pos = self._asked[layer]
        places = k_pos.to(k.device)[slots]
        score = scores(q, keys, q_pos.to(k.device), places, scale=scale)
        observed = places >= int(q_pos[0])
        score = score.masked_fill(observed, float("inf"))  # kept beside the budget
        count = min(score.shape[1], p.budget + int(observed[0].sum()))
        best = score.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
        slots = slots.gather(1, best)
        every = torch.arange(heads, device=k.device)[:, None]
        self.kept[layer] = KeptLines(slots, k[slots, every], v[slots, every], rows)
        return score.shape[1]


def scores(q: Tensor, keys: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    """[Hkv, m] of rows q [T, Hq, d] over keys [Hkv, m, d] at k_pos [Hkv, m]: sums of attention (Eq. 7). No row sees
    keys behind it."""
    asked = q.unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3).to(wide(q.dtype))
    all_scores = asked @ keys.to(asked.dtype).mT[:, None] * scale
    hidden = k_pos[:, None, None, :] > q_pos[:, None]
    shares: Tensor = all_scores.masked_fill_(hidden, float("-inf")).softmax(-1).sum((1, 2))
    return shares
