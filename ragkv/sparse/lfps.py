"""LFPS: keys that recently had a high score, by position or by distance, are the candidates of the next step.

Paper: Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding (arXiv 2506.15704), algorithm 1. Our
text of the paper has lost its formulas. The formulas here are built from its words, its appendix and its tables 3
and 4.

    S_v [H, P]         vertical table: score of a key by its position
    S_s [H, P]         slash table: score by offset o = query position - key position
    kbar, vbar         [Hkv, d] mean key and value of the prompt without the sinks
    r [Hq]             variance of the last prompt query's scores, divided by its squared norm
    rho [Hq]           estimated share of the sinks in the attention of the token
    C0, C              candidates by the tables; those and their neighbours
    S                  the keys of C with the best exact scores; these are read
    gamma, beta        decay of the tables; how far above its mean a score must be to make a candidate

Sinks are always read and are in no table. Tables are over absolute positions, so gaps in a stitched context and tokens
that bypassed heads skipped need no special care; the cache is read by slots. `lfps_tables.py` holds the state of a
layer.

Differs from the paper:

- The last tokens are always read, besides the top k. Scores are learned from them, too, so a step sees its own token.
- Candidates are marked when the step before has ended, from the tables alone: before the token's query exists, as in
  the paper, so that what reads them could load them meanwhile. `bypass` drops those of idle heads when the query is
  there.
- The paper keeps the sinks on the GPU and all other keys in host memory, where the CPU attends to the candidates.
  `split` does so, and keeps the newest keys on the GPU, too (`model/execution/split_context.py`). With `split=0` keys,
  tables and attention are where the cache is. `auto` does not split, and uses the policy on a CPU only.
- Bypassing is off. It misjudges heads whose attention is spread over many keys: with .85 the error of a layer is three
  times as large, and no time is saved (docs/results/decode.md).
- The query heads of a group share tables and candidates, so the keys of a kv head are gathered and scored once for its
  whole group. With `heads="query"` each query head has its own, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.kernels.attention import merge
from ragkv.sparse.attention import attend_heads, score_dtype
from ragkv.sparse.base import DecodePolicy, DecodeState, KeyCount
from ragkv.sparse.lfps_candidates import prompt_statistics, sink_share, thresholds
from ragkv.sparse.lfps_chosen import CandidateScores, ChosenKeys
from ragkv.sparse.lfps_marked import Marked
from ragkv.sparse.lfps_tables import KeyScores


@dataclass(frozen=True)
class Lfps(DecodePolicy):
    """Parameters. With beta = -inf, share = 1 and bypass = 1, everything is read. All formulas: paper lost.

    Attributes:
        sinks: Tokens at the start that are always read.
        rows: Last queries of the prompt that fill the tables, the paper's T (lost; 1/(1 - decay)).
        decay: The paper's gamma.
        bypass: Share of the sinks above which a query head is not computed (paper: .85); 1 for never.
        beta: Thresholds of candidates, in deviations (paper: .2 and .3).
        local: Last tokens that stand for recent attention (paper: "e.g. five") and are always read (paper silent).
        reach: Offsets of the neighbours that become candidates.
        share: Candidates that are read, as a share of all keys: k = max(least, share of all) (paper silent).
        least: Smallest k (paper silent).
        heads: Tables and candidates per `kv` head or per `query` head. The latter takes twice the time, reads more keys
            and answers no better (docs/lab-notes.md; paper silent on grouped heads).
        split: Newest keys that stay with the sinks where the model computes, which reads all of them. The CPU reads
            the best candidates of the others, in host memory. 0 leaves all keys in one memory (paper: the sinks alone
            stay).
    """

    sinks: int = 4
    rows: int = 20
    decay: float = 0.95
    bypass: float = 1.0
    beta: float = 0.2
    local: int = 5
    reach: tuple[int, ...] = (-1, 1, 2)
    share: float = 0.02
    least: int = 64
    heads: Literal["kv", "query"] = "kv"
    split: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.rows < 1 or self.local < 1 or self.least < 0:
            raise ValueError("rows and local must be at least 1, sinks and least not negative")
        if not (0 < self.decay < 1 and 0 <= self.bypass <= 1 and 0 <= self.share <= 1):
            raise ValueError("decay must be between 0 and 1, bypass and share from 0 to 1")
        if not (0 <= self.beta < math.inf or self.beta == -math.inf):
            raise ValueError("beta must not be negative; -inf makes every key a candidate")
        if any(abs(offset) > 8 for offset in self.reach):
            raise ValueError("reach must stay within 8 places")
        if self.heads not in ("query", "kv"):
            raise ValueError("heads must be 'query' or 'kv'")
        if self.split and (self.split < self.local or self.bypass < 1):
            raise ValueError("split must be 0 or at least local, and needs bypass=1")

    def start(self) -> LfpsState:
        """Create the state of one request."""
        return LfpsState(self)


class LfpsState(DecodeState):
    """State of one request.

    Attributes:
        params: The parameters.
        scores: Score tables, by layer.
        bypassed: bool [Hq] of the last step, by layer.
        rho: [Hq] of the last step, by layer.
        ahead: Candidates of the next token, by layer, which were marked without its query.
    """

    name = "lfps"

    def __init__(self, params: Lfps):
        super().__init__()
        self.params, self.query_rows = params, params.rows
        self.scores: dict[int, KeyScores] = {}
        self.bypassed: dict[int, Tensor] = {}
        self.rho: dict[int, Tensor] = {}
        self.ahead: dict[int, Marked] = {}
        self._unmarked: tuple[int, int, int] | None = None
        self._candidates = CandidateScores()

    def learn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> None:
        """Fill the tables from the last rows (prefilling)."""
        p, positions = self.params, k_pos.to(k.device)
        sinks = positions.argsort()[: p.sinks]
        outside = torch.ones_like(positions, dtype=torch.bool)
        outside[sinks] = False
        rows = q[-p.rows :], q_pos[-p.rows :]
        vertical, slash = prompt_tables(rows[0], k, rows[1].to(k.device), positions, outside, p, scale=scale)
        statistics = prompt_statistics(q[-1], k, v, outside, scale=scale) if bool(outside.any()) else None
        self.scores[layer] = KeyScores(vertical, slash, positions, sinks, p.local, statistics)
        self.ahead.pop(layer, None)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with one token (decoding, steps 1 to 4). See `DecodeState.step`."""
        p, scores, now, rows = self.params, self.scores[layer], int(k_pos[-1]), k.shape[0]
        marked = self._pop_ahead(layer, now, rows - 1)
        queries = q.unflatten(0, (k.shape[1], -1)).to(score_dtype(q.dtype))
        sink = attend_heads(queries, *(x[scores.sinks].transpose(0, 1) for x in (k, v)), scale=scale)
        rho = sink_share(queries, k, scores, sink[1], scale=scale)
        idle = (rho > p.bypass) if scores.statistics is not None else torch.zeros_like(rho, dtype=torch.bool)
        busy = ~idle if p.heads == "query" else ~idle.all(-1)
        scores.decay(torch.where(busy.flatten(), p.decay, busy.new_ones(1, dtype=torch.float64)))  # Eq. 10, gamma
        candidates = marked.of_rows(busy.flatten())
        chosen = self._choose(scores, candidates, idle, queries * scale, k)
        out = merge([sink, chosen.read(v)])[0]
        if scores.statistics is not None:
            mean = rho[..., None] * sink[0] + (1 - rho[..., None]) * scores.statistics.mean_value[:, None]
            out = torch.where(idle[..., None], mean, out)
        self.bypassed[layer], self.rho[layer] = idle.flatten(), rho.flatten()
        self.ahead[layer] = mark_candidates(scores, now + 1, rows, p)
        return out.flatten(0, 1).to(q.dtype), candidates.counts + len(scores.sinks)

    def attend_before(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, first: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with one token to the chosen keys before a position. Sinks and all others are read elsewhere.

        The tables learn as in `step`. Call `mark_ahead` before the next token comes to the layer.

        Args:
            layer: Layer number.
            q: The query [Hq, d].
            k: Keys [n, Hkv, d] of the layer, the token's own last.
            v: Values, likewise.
            k_pos: Positions [n], on the CPU.
            first: The position: after the sinks, and not after the last tokens.
            scale: Softmax scale.

        Returns:
            The output [Hkv, g, d] and its log-sum-exp [Hkv, g], which is -inf where nothing is chosen.
        """
        scores, now, rows = self.scores[layer], int(k_pos[-1]), k.shape[0]
        self._record_rows(layer, k_pos)
        marked = self._pop_ahead(layer, now, rows - 1)
        queries = q.unflatten(0, (k.shape[1], -1)).to(score_dtype(q.dtype))
        scores.decay(scores.vertical.scale.new_full((1,), self.params.decay))  # Eq. 10, gamma
        idle = torch.zeros(queries.shape[:2], dtype=torch.bool, device=k.device)
        chosen = self._choose(scores, marked, idle, queries * scale, k)
        elsewhere = int((k_pos >= first).sum()) + len(scores.sinks)
        self.key_counts.append(KeyCount(layer, marked.counts_before(first) + elsewhere, rows))
        self._unmarked = layer, now + 1, rows
        return chosen.read(v, first)

    def mark_ahead(self) -> None:
        """Mark the next token's candidates in the layer of the latest `attend_before`."""
        if self._unmarked is not None:
            layer, now, row = self._unmarked
            self.ahead[layer] = mark_candidates(self.scores[layer], now, row, self.params)
            self._unmarked = None

    def _pop_ahead(self, layer: int, now: int, row: int) -> Marked:
        """Return the candidates of the token at position `now` in cache row `row`; marked ahead if it was foreseen."""
        marked = self.ahead.pop(layer, None)
        if marked is None or (marked.now, marked.row) != (now, row):
            if marked is not None:
                self.scores[layer].drop_token(marked)
            marked = mark_candidates(self.scores[layer], now, row, self.params)
        return marked

    def _choose(self, scores: KeyScores, marked: Marked, idle: Tensor, q: Tensor, k: Tensor) -> ChosenKeys:
        """Choose the best candidates by scaled queries [Hkv, g, d], and add their weights to the tables."""
        keep = max(self.params.least, math.ceil(self.params.share * scores.scored))
        chosen = self._candidates.select(marked, idle, q, k, recent=scores.recent, keep=keep)
        chosen.teach(scores)
        return chosen


def prompt_tables(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, outside: Tensor, params: Lfps, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute S_v by position and S_s by offset [H, P] from the last prompt rows (Eq. 4).

    Each table sums to .5 / (1 - decay), and the steps preserve this sum.

    Args:
        q: Queries [T, Hq, d].
        k: Keys [n, Hkv, d].
        q_pos: Positions [T] of the queries.
        k_pos: Positions [n] of the keys.
        outside: bool [n], keys that are not sinks.
        params: The parameters.
        scale: Softmax scale.
    """
    heads, group, span = k.shape[1], q.shape[1] // k.shape[1], int(k_pos.max()) + 1
    c = 1 / (2 * len(q) * (1 - params.decay))
    hidden = ~outside | (k_pos > q_pos[:, None])
    blind = hidden.all(-1)[:, None]
    by_position, by_offset = [], []
    for head in range(heads):
        queries = q[:, head * group : (head + 1) * group].transpose(0, 1).to(score_dtype(q.dtype))
        scores = queries @ k[:, head].to(queries.dtype).T * scale
        a = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(blind, 0.0)
        if params.heads == "kv":
            a = a.mean(0, keepdim=True)
        placed = a.new_zeros(*a.shape[:2], span).index_copy_(2, k_pos, a)
        offsets = a.new_zeros(a.shape[0], span)
        for t, at in enumerate(q_pos.tolist()):
            offsets[:, : at + 1] += placed[:, t, : at + 1].flip(-1)
        by_position.append(c * placed.sum(1))
        by_offset.append(c * offsets)
    return torch.cat(by_position), torch.cat(by_offset)  # Eq. 4


def mark_candidates(scores: KeyScores, now: int, row: int, params: Lfps) -> Marked:
    """Mark C for the token at position `now` in cache row `row`: what the tables name, neighbours and the last tokens.

    The token joins the tables. Its query and its key are not needed.
    """
    recent = scores.recent
    scores.append_token(now, row)
    if params.beta == -math.inf:
        scores.mark_all(now)
    else:
        vertical, slash = scores.vertical.moments(scores.scored), scores.slash.moments(scores.scored)
        tau_v, tau_s = thresholds(vertical, slash, params.beta)
        scores.mark_above(tau_v, tau_s, now)  # C0, Eq. 7
        scores.mark_neighbours(params.reach, vertical.mean, slash.mean, now)  # C, Eq. 9
        scores.mark_recent()
    return Marked(now, row, *scores.pop_marked(), recent)
