"""LFPS in plain loops over keys, float64: the oracle of the real tables, thresholds and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragkv.sparse.lfps import Lfps
from tests.sparse.toy_request import Request

REACH = (-1, 1, 2)
LOCAL = 5


@dataclass
class NaiveStep:
    """What one step computes.

    Attributes:
        out: Output [d] per query head.
        rho: Share of the sinks per query head.
        local_wins: Whether A_local was above A_global, per query head.
        candidates: Keys that were scored, per list.
    """

    out: list[Tensor]
    rho: list[float]
    local_wins: list[bool]
    candidates: list[list[int]]


@dataclass
class NaiveLfps:
    """Tables and statistics of one layer. Positions are rows of the cache, without gaps.

    Attributes:
        request: The request.
        params: The parameters.
        vertical: S_v by position, per list.
        slash: S_s by offset, per list.
    """

    request: Request
    params: Lfps
    vertical: list[dict[int, float]] = field(default_factory=list)
    slash: list[dict[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heads, self.group = self.request.k.shape[1], self.request.q.shape[1] // self.request.k.shape[1]
        size = self.group if self.params.heads == "kv" else 1
        self.lists = [list(range(h, h + size)) for h in range(0, self.request.q.shape[1], size)]
        self._fill()

    def score(self, row: int, head: int, key: int) -> float:
        """Compute q · k · scale of the query of cache row `row`."""
        q = self.request.q[row - self.request.rows + self.request.question, head]
        return float(q @ self.request.k[key, head // self.group]) * self.request.scale

    def _fill(self) -> None:
        """Compute both tables from the last T prompt rows (Eq. 4)."""
        r, p = self.request, self.params
        rows = range(r.rows - min(p.rows, r.question), r.rows)
        c = 1 / (2 * len(rows) * (1 - p.decay))
        for members in self.lists:
            vertical, slash = {}, {}
            for row in rows:
                for head in members:
                    exps = {key: math.exp(self.score(row, head, key)) for key in range(p.sinks, row + 1)}
                    for key, value in exps.items():
                        a = c * value / sum(exps.values()) / len(members)
                        vertical[key] = vertical.get(key, 0.0) + a
                        slash[row - key] = slash.get(row - key, 0.0) + a
            self.vertical.append(vertical)
            self.slash.append(slash)

    def _estimates(self, now: int, head: int) -> tuple[float, float, float]:
        """Compute A_sink, A_global and A_local (Eq. 5)."""
        r, p = self.request, self.params
        outside = range(p.sinks, r.rows)
        mean_key = sum(r.k[key, head // self.group] for key in outside) / len(outside)
        scores = [self.score(r.rows - 1, head, key) for key in outside]
        center = sum(scores) / len(scores)
        variance = sum((s - center) ** 2 for s in scores) / len(scores)
        last, q = r.q[r.question - 1, head], r.q[now - r.rows + r.question, head]
        ratio = variance / float(last @ last)
        middle = float(q @ mean_key) * r.scale
        a_global = (now + 1 - p.sinks) * math.exp(middle + ratio * float(q @ q) / 2)
        a_sink = sum(math.exp(self.score(now, head, key)) for key in range(p.sinks))
        return a_sink, a_global, sum(math.exp(self.score(now, head, key)) for key in range(now - LOCAL + 1, now + 1))

    def _moments(self, table: dict[int, float], count: int) -> tuple[float, float, float]:
        """Compute mean, population deviation and kurtosis over `count` values, 0 where the table has none."""
        values = [*table.values(), *[0.0] * (count - len(table))]
        center = sum(values) / count
        variance = sum((x - center) ** 2 for x in values) / count
        return center, math.sqrt(variance), sum((x - center) ** 4 for x in values) / count / variance**2

    def thresholds(self, number: int, count: int) -> tuple[float, float]:
        """Compute tau_v and tau_s of one list (Eq. 8)."""
        tables = [self._moments(table, count) for table in (self.vertical[number], self.slash[number])]
        both = math.sqrt(tables[0][2] * tables[1][2])
        factors = [min(4.0, max(0.25, math.sqrt(both / kurtosis))) for _, _, kurtosis in tables]
        tau = [mean + self.params.beta * sd * f for (mean, sd, _), f in zip(tables, factors, strict=True)]
        return tau[0], tau[1]

    def _candidates(self, number: int, now: int) -> list[int]:
        """Collect C: what the tables name, neighbours above the mean of a table, and the last tokens (Eq. 7, 9)."""
        vertical, slash, count = self.vertical[number], self.slash[number], now + 1 - self.params.sinks
        tau_v, tau_s = self.thresholds(number, count)
        mean_v, mean_s = sum(vertical.values()) / count, sum(slash.values()) / count
        first = [i for i in range(now + 1) if vertical.get(i, 0.0) > tau_v or slash.get(now - i, 0.0) > tau_s]
        near = {i + delta for i in first for delta in REACH if 0 <= i + delta <= now}
        liked = {j for j in near if vertical.get(j, 0.0) > mean_v or slash.get(now - j, 0.0) > mean_s}
        every = {*first, *liked, *range(now - LOCAL + 1, now + 1)}
        return sorted(key for key in every if key >= self.params.sinks)

    def step(self, at: int) -> NaiveStep:
        """Run one decode step."""
        r, p, now = self.request, self.params, self.request.rows + at
        estimates = [self._estimates(now, head) for head in range(r.q.shape[1])]
        rho = [sink / (sink + max(whole, local)) for sink, whole, local in estimates]
        outside = range(p.sinks, r.rows)
        out, candidates = [torch.empty(0)] * len(rho), []
        for number, members in enumerate(self.lists):
            busy = [head for head in members if rho[head] <= p.bypass]
            found = self._candidates(number, now) if busy else []
            candidates.append(found)
            added: dict[int, float] = {}
            for head in members:
                sinks = {key: math.exp(self.score(now, head, key)) for key in range(p.sinks)}
                v = r.v[:, head // self.group]
                if head not in busy:
                    sink = sum(w * v[key] for key, w in sinks.items()) / sum(sinks.values())
                    out[head] = rho[head] * sink + (1 - rho[head]) * sum(v[key] for key in outside) / len(outside)
                    continue
                exps = {key: math.exp(self.score(now, head, key)) for key in found}
                recent = [key for key in found if key > now - LOCAL]
                others = sorted((key for key in found if key <= now - LOCAL), key=lambda key: -exps[key])
                keep = max(p.least, math.ceil(p.share * (now + 1 - p.sinks)))
                best = {key: exps[key] for key in (*others[:keep], *recent)}
                for key, value in best.items():
                    added[key] = added.get(key, 0.0) + 0.5 * value / sum(best.values()) / len(busy)
                both = {**sinks, **best}
                out[head] = sum(w * v[key] for key, w in both.items()) / sum(both.values())
            if busy:
                self._update(number, added, now)
        return NaiveStep(out, rho, [local > whole for _, whole, local in estimates], candidates)

    def _update(self, number: int, added: dict[int, float], now: int) -> None:
        """Let the tables decay and add the weights of this step (Eq. 10)."""
        for table in (self.vertical[number], self.slash[number]):
            for index in table:
                table[index] *= self.params.decay
        for key, weight in added.items():
            self.vertical[number][key] = self.vertical[number].get(key, 0.0) + weight
            self.slash[number][now - key] = self.slash[number].get(now - key, 0.0) + weight
