"""LFPS: which keys mattered lately, by place or by distance, says which to look at now; the best of those are read.

Paper: Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding (arXiv 2506.15704), algorithm 1. The
text we have has lost its formulas; what stands here is built from its words, its appendix and its tables 3 and 4.

    S_v [H, P]         vertical table: score of a key by its position
    S_s [H, P]         slash table: score by offset o = query position - key position
    kbar, vbar         [Hkv, d] mean key and value of the prompt without the sinks
    r [Hq]             variance of the last prompt query's scores / its squared norm
    rho [Hq]           estimated share of the sinks in the attention of the token
    C0, C              candidates by the tables; those and their neighbours
    S                  the keys of C with the best exact scores, which are read
    gamma, beta        decay of the tables; how far above its mean a score must be to make a candidate

Sinks are always read and are in no table. Tables are over absolute positions, so gaps in a stitched context and tokens
that bypassed heads skipped need no care; the cache is read by slots. What one layer remembers is in `past.py`.

Differs from the paper: the last tokens are always read, beside the top k, and learned from like the others, so a
step sees its own token; the query heads of a group share tables and candidates, so that keys of a kv head are fetched
and scored once for its whole group (`heads="query"`: as in the paper, each for itself).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.attention import merge
from ragkv.sparse.base import DecodePolicy, DecodeState, wide
from ragkv.sparse.past import KeyTables, Moments, Prior, true


@dataclass(frozen=True)
class Lfps(DecodePolicy):
    """sinks: tokens at the start that are always read · rows: last queries of the prompt that fill the tables, the
    paper's T (lost; 1/(1 - decay)) · decay: the paper's gamma · bypass: share of the sinks above which a query head is
    not computed, 1 for never · beta: thresholds of candidates, in deviations (paper: .2 and .3) · local: last tokens
    that stand for recent attention (paper: "e.g. five") and are always read (paper silent) · reach: offsets of
    neighbours that become candidates · share, least: keys kept of the candidates, k = max(least, share of all) (paper
    silent) · heads: tables and candidates per `kv` head, or per `query` head, which takes twice the time, reads more
    keys and answers no better (docs/lab-notes.md; paper silent on grouped heads). All formulas: paper lost.

    Everything is read with beta = -inf, share = 1, bypass = 1.
    """

    sinks: int = 4
    rows: int = 20
    decay: float = 0.95
    bypass: float = 0.85
    beta: float = 0.2
    local: int = 5
    reach: tuple[int, ...] = (-1, 1, 2)
    share: float = 0.02
    least: int = 64
    heads: Literal["kv", "query"] = "kv"

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

    def start(self) -> Learned:
        """State of one request."""
        return Learned(self)


class Learned(DecodeState):
    """What one request has learned, by layer. Of the last step, by layer: bypassed bool [Hq], rho [Hq]."""

    def __init__(self, params: Lfps):
        super().__init__()
        self.params, self.rows = params, params.rows
        self.past: dict[int, KeyTables] = {}
        self.bypassed: dict[int, Tensor] = {}
        self.rho: dict[int, Tensor] = {}
        self._rooms: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Fill the tables from the last rows (prefilling)."""
        p, places = self.params, k_pos.to(k.device)
        sinks = places.argsort()[: p.sinks]
        outside = torch.ones_like(places, dtype=torch.bool)
        outside[sinks] = False
        rows = q[-p.rows :], q_pos[-p.rows :]
        vertical, slash = tables(rows[0], k, rows[1].to(k.device), places, outside, p, scale=scale)
        prior = priors(q[-1], k, v, outside, scale=scale) if bool(outside.any()) else None
        self.past[layer] = KeyTables(vertical, slash, places, sinks, p.local, prior)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """One token (decoding, steps 1 to 4)."""
        p, past, now = self.params, self.past[layer], int(k_pos[-1])
        past.remember(now, k.shape[0] - 1)
        asked = q.unflatten(0, (k.shape[1], -1)).to(wide(q.dtype))
        sink = over(asked, k[past.sinks], v[past.sinks], scale=scale)
        rho = sparsity(asked, k, past, sink[1], scale=scale)
        idle = (rho > p.bypass) if past.prior is not None else torch.zeros_like(rho, dtype=torch.bool)
        candidates(past, now, idle, p)
        busy = ~idle if p.heads == "query" else ~idle.all(-1)
        past.fade(torch.where(busy.flatten(), p.decay, busy.new_ones(1, dtype=torch.float64)))  # Eq. 10, gamma
        found, lse, read = self._retrieve(past, now, idle, asked, k, v, scale=scale)
        out = merge([sink, (found, lse)])[0]
        if past.prior is not None:
            mean = rho[..., None] * sink[0] + (1 - rho[..., None]) * past.prior.v[:, None]
            out = torch.where(idle[..., None], mean, out)
        self.bypassed[layer], self.rho[layer] = idle.flatten(), rho.flatten()
        return out.flatten(0, 1).to(q.dtype), read + len(past.sinks)

    def _retrieve(
        self, past: KeyTables, now: int, idle: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read the best of the candidates and learn from them.

        Returns out [Hkv, g, d], its log-sum-exp [Hkv, g], -inf for idle heads, and keys scored [H].
        """
        heads, group = q.shape[:2]
        places, slots, starts = past.take()
        lists, counts, most = len(starts) - 1, starts.diff(), int(starts.diff().max())
        if not most:
            return torch.zeros_like(q), q.new_full((heads, group), -math.inf), counts
        keys, values = k.reshape(-1, k.shape[2]), v.reshape(-1, v.shape[2])
        flat = slots * heads + (torch.arange(lists, device=q.device) * heads // lists).repeat_interleave(counts)
        asked, busy = (q * scale).reshape(lists, -1, q.shape[2]), ~idle.view(lists, -1, 1)
        scores = q.new_full((*asked.shape[:2], most), -math.inf)
        for row, (start, stop) in enumerate(pairwise(starts.tolist())):
            scores[row, :, : stop - start] = asked[row] @ self._gather(keys, flat[start:stop], q.dtype).T
        scores.masked_fill_(~busy, -math.inf)
        best = top(scores, counts, max(self.params.least, math.ceil(self.params.share * past.others)), past.recent)
        kept = scores.gather(-1, best)
        lse = kept.logsumexp(-1, keepdim=True)
        weights = torch.exp(kept - lse.masked_fill(~busy, 0.0))
        # What a list lacks scores -inf and weighs nothing; any row of the cache may stand for it.
        chosen = (starts[:-1, None, None] + best).clamp_(max=len(places) - 1)
        if self.params.heads == "query":
            lacking = best[:, 0] >= counts[:, None]
            past.learn(pick(places, chosen[:, 0]).masked_fill_(lacking, -1), 0.5 * weights[:, 0], now)  # Eq. 10, w
        else:
            whole = weights.new_zeros(scores.shape).scatter_(-1, best, weights).sum(1) / busy.sum(1).clamp(min=1)
            at = torch.arange(most, device=q.device).expand(lists, -1)
            named = pick(places, (starts[:-1, None] + at).clamp_(max=len(places) - 1))
            past.learn(named.masked_fill_(at >= counts[:, None], -1), 0.5 * whole, now)
        rows, shares = pick(flat, chosen).flatten(0, 1), weights.flatten(0, 1).to(v.dtype)
        out = F.embedding_bag(rows, values, mode="sum", per_sample_weights=shares)  # Eq. 1
        return out.to(q.dtype).view_as(q), lse.view(heads, group), counts

    def _gather(self, x: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `at` [m] of x [rows, d], good until the next fetch: into the same memory each time, since new pages cost
        as much as the rows."""
        found = []
        for kind in (x.dtype, dtype):
            room = self._rooms.get((x.device, kind))
            if room is None or room.shape[0] < len(at):
                room = self._rooms[x.device, kind] = x.new_empty(2 * len(at), x.shape[1], dtype=kind)
            found.append(room[: len(at)])
        torch.index_select(x, 0, at, out=found[0])
        return found[0] if x.dtype == dtype else found[1].copy_(found[0])


def tables(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, outside: Tensor, params: Lfps, *, scale: float
) -> tuple[Tensor, Tensor]:
    """S_v by position and S_s by offset [H, P], of the last prompt rows q [T, Hq, d] over k [n, Hkv, d] (Eq. 4).

    outside: bool [n], keys that are no sinks. Each table sums to .5 / (1 - decay), which the steps keep.
    """
    heads, group, span = k.shape[1], q.shape[1] // k.shape[1], int(k_pos.max()) + 1
    c = 1 / (2 * len(q) * (1 - params.decay))
    hidden = ~outside | (k_pos > q_pos[:, None])
    blind = hidden.all(-1)[:, None]
    by_place, by_offset = [], []
    for head in range(heads):
        asked = q[:, head * group : (head + 1) * group].transpose(0, 1).to(wide(q.dtype))
        scores = asked @ k[:, head].to(asked.dtype).T * scale
        a = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(blind, 0.0)
        if params.heads == "kv":
            a = a.mean(0, keepdim=True)
        placed = a.new_zeros(*a.shape[:2], span).index_copy_(2, k_pos, a)
        offsets = a.new_zeros(a.shape[0], span)
        for t, at in enumerate(q_pos.tolist()):
            offsets[:, : at + 1] += placed[:, t, : at + 1].flip(-1)
        by_place.append(c * placed.sum(1))
        by_offset.append(c * offsets)
    return torch.cat(by_place), torch.cat(by_offset)  # Eq. 4


def priors(q: Tensor, k: Tensor, v: Tensor, outside: Tensor, *, scale: float) -> Prior:
    """Of the rows outside [n] bool of k, v [n, Hkv, d], and the prompt's last query q [Hq, d]."""
    asked = q.unflatten(0, (k.shape[1], -1)).to(wide(q.dtype))
    slots, sinks = true(outside), true(~outside)
    kbar, vbar = ((x.sum(0, dtype=asked.dtype) - x[sinks].sum(0, dtype=asked.dtype)) / len(slots) for x in (k, v))
    variance = [
        (mine @ k[:, head].to(asked.dtype).T * scale).index_select(1, slots).var(-1, correction=0)
        for head, mine in enumerate(asked)
    ]
    square = asked.square().sum(-1).clamp(min=torch.finfo(asked.dtype).tiny)
    return Prior(kbar, vbar, torch.stack(variance) / square)


def sparsity(q: Tensor, k: Tensor, past: KeyTables, sink: Tensor, *, scale: float) -> Tensor:
    """rho [Hkv, g] of q [Hkv, g, d], the sinks' log-sum-exp [Hkv, g] given."""
    slots = past.slot[past.recent]
    recent = k[slots[slots >= 0]].to(q.dtype)
    local = (q @ recent.permute(1, 2, 0) * scale).logsumexp(-1)  # log A_local, Eq. 5
    if past.prior is None:
        return ratio(sink, local, local)
    middle = (q @ past.prior.k[..., None])[..., 0] * scale
    whole = math.log(past.others) + middle + past.prior.r * q.square().sum(-1) / 2  # log A_global, Eq. 5
    return ratio(sink, whole, local)


def ratio(sink: Tensor, whole: Tensor, local: Tensor) -> Tensor:
    """rho = A_sink / (A_sink + max(A_global, A_local)), of logarithms, so that scores of any size do."""
    return torch.exp(sink - torch.logaddexp(sink, torch.maximum(whole, local)))  # Eq. 6


def thresholds(vertical: Moments, slash: Moments, beta: float) -> tuple[Tensor, Tensor]:
    """tau_v, tau_s [H] = mean + beta · deviation · f; the table with the sharper peaks gets the lower bar."""
    both = (vertical.kurtosis * slash.kurtosis).sqrt()
    tau_v, tau_s = (
        each.mean + beta * each.deviation * (both / each.kurtosis).sqrt().clamp(1 / 4, 4) for each in (vertical, slash)
    )
    return tau_v, tau_s  # Eq. 8


def candidates(past: KeyTables, now: int, idle: Tensor, params: Lfps) -> None:
    """Mark C: what the tables name for heads that are not idle, its neighbours, and the last tokens."""
    busy = ~idle.flatten() if params.heads == "query" else ~idle.all(-1)
    if params.beta == -math.inf:
        past.mark_all(now, busy)
        return
    vertical, slash = past.vertical.moments(past.others), past.slash.moments(past.others)
    tau_v, tau_s = (tau.masked_fill(~busy, math.inf) for tau in thresholds(vertical, slash, params.beta))
    past.mark(tau_v, tau_s, now)  # C0, Eq. 7
    past.mark_near(params.reach, vertical.mean, slash.mean, now)  # C, Eq. 9
    past.mark_recent(busy)


def top(scores: Tensor, counts: Tensor, keep: int, recent: Tensor) -> Tensor:
    """Indices [H, g, .] of the best `keep` of scores [H, g, m] and of the recent ones, which end each list of counts
    [H]; of all where there are no more."""
    keep, most = keep + len(recent), scores.shape[-1]
    if most <= keep:
        return torch.arange(most, device=scores.device).expand(scores.shape)
    last = (counts[:, None] - 1 - torch.arange(len(recent), device=scores.device)).clamp_(min=0)
    raised = scores.scatter(-1, last[:, None].expand(-1, scores.shape[1], -1), math.inf)
    return raised.topk(keep, dim=-1, sorted=False).indices


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x[at] for x [n]; four times as quick."""
    return x.index_select(0, at.flatten()).view(at.shape)


def over(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """out [Hkv, g, d] and log-sum-exp [Hkv, g] of q [Hkv, g, d] over k, v [m, Hkv, d]; the identity of `merge` for
    none."""
    if not len(k):
        return torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)
    scores = q @ k.to(q.dtype).permute(1, 2, 0) * scale
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ v.to(q.dtype).transpose(0, 1), lse
