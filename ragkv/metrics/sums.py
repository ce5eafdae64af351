"""Tally: sums over all answers since the start. One truth for /metrics, the dashboard and `ragkv top`.

Sums and no ratios: a ratio of two differences of sums is right for any span of time, a mean of ratios for none.
What is counted is what the reports say (ragkv/report.py), so the sums of all reports and these agree to the digit.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar, get_args

from ragkv.report import Report, Timings

K = TypeVar("K")
N = TypeVar("N", int, float)

Outcome = Literal["invalid", "failed", "cancelled", "expired", "refused"]
"""How a question ended that was not answered: it cannot be (4xx), an error of the service, given up by whoever asked,
its time was up, no place in the line."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_DECADE = (1, 1.5, 2, 3, 5, 7)
BOUNDS: tuple[float, ...] = (*(float(f"{digits}e{power}") for power in range(-4, 2) for digits in _DECADE), 100.0)
"""Upper ends of a histogram's buckets, in seconds; what is above the last has one of its own."""
STEPS = tuple(each.name for each in fields(Timings))
TOKENS: tuple[str, ...] = ("context", "kept", "recomputed", "question", "generated", "prefilled")
TIERS = ("gpu", "host", "store")


@dataclass(frozen=True)
class Histogram:
    """counts: of each bucket, not added up, the one above all BOUNDS last · total: of what was observed."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    total: float = 0.0

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    def observed(self, value: float) -> Histogram:
        """With one more."""
        at = bisect_left(BOUNDS, value)
        return Histogram((*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :]), self.total + value)

    def since(self, earlier: Histogram) -> Histogram:
        """What came after."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(counts, self.total - earlier.total)

    def quantile(self, share: float) -> float | None:
        """As PromQL's histogram_quantile: linear inside its bucket, at most the last of BOUNDS; None without
        observations."""
        rank, below = share * self.count, 0
        if not self.count:
            return None
        for place, (count, high) in enumerate(zip(self.counts, BOUNDS, strict=False)):
            if count and below + count >= rank:
                low = BOUNDS[place - 1] if place else 0.0
                return low + (high - low) * (rank - below) / count
            below += count
        return BOUNDS[-1]


@dataclass(frozen=True)
class MetricSums:
    """answers: by method, prefill and decode policy, names without fields · ended: questions that were not answered ·
    tokens: by kind, those of Tokens · lookups: chunks looked up, by the tier that had them, "" for none · kv_bytes:
    `context_kv`, `heads`, `loaded` · fallbacks: chunks encoded again because their stored KV could not be used ·
    pulled: blocks that decoding brought back · seconds: by step, those of Timings · full_seconds: to the first token,
    as full recompute is estimated to take for the same questions."""

    answers: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    ended: Mapping[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0.0))
    lookups: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys((*TIERS, ""), 0))
    kv_bytes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(("context_kv", "heads", "loaded"), 0))
    fallbacks: int = 0
    pulled: int = 0
    seconds: Mapping[str, Histogram] = field(default_factory=lambda: dict.fromkeys(STEPS, Histogram()))
    full_seconds: float = 0.0

    def since(self, earlier: MetricSums) -> MetricSums:
        """What came after."""
        return MetricSums(
            answers=_minus(self.answers, earlier.answers),
            ended=_minus(self.ended, earlier.ended),
            tokens=_minus(self.tokens, earlier.tokens),
            lookups=_minus(self.lookups, earlier.lookups),
            kv_bytes=_minus(self.kv_bytes, earlier.kv_bytes),
            fallbacks=self.fallbacks - earlier.fallbacks,
            pulled=self.pulled - earlier.pulled,
            seconds={step: now.since(earlier.seconds[step]) for step, now in self.seconds.items()},
            full_seconds=self.full_seconds - earlier.full_seconds,
        )

    @property
    def answered(self) -> int:
        """Answers of all methods."""
        return sum(self.answers.values())

    @property
    def full(self) -> float | None:
        """Seconds to the first token by full recompute, estimated, in the mean of the answers."""
        return _ratio(self.full_seconds, self.answered) or None

    @property
    def sequence(self) -> float | None:
        """Tokens kept / tokens of the context; None before the first answer, as the other ratios."""
        return _ratio(self.tokens["kept"], self.tokens["context"])

    @property
    def recompute(self) -> float | None:
        """Tokens computed again / tokens of the context."""
        return _ratio(self.tokens["recomputed"], self.tokens["context"])

    @property
    def load(self) -> float | None:
        """Bytes read, heads included / bytes of the context's KV."""
        return _ratio(self.kv_bytes["heads"] + self.kv_bytes["loaded"], self.kv_bytes["context_kv"])

    @property
    def saved(self) -> int:
        """Bytes of the context's KV that were not read."""
        return self.kv_bytes["context_kv"] - self.kv_bytes["heads"] - self.kv_bytes["loaded"]

    @property
    def cache_hit(self) -> float | None:
        """Chunks found in any tier / chunks looked up."""
        return _ratio(sum(self.lookups[tier] for tier in TIERS), sum(self.lookups.values()))

    def hit_by(self, tier: str) -> float | None:
        """Chunks found in this tier / chunks looked up."""
        return _ratio(self.lookups[tier], sum(self.lookups.values()))


class MetricsRecorder:
    """Thread-safe. Whoever reads takes `sums`, which do not change any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = MetricSums()

    @property
    def sums(self) -> MetricSums:
        """Since the start."""
        return self._sums

    def answered(self, report: Report, full_ms: float = 0.0) -> None:
        """A question was answered. full_ms: to the first token, had all of it been computed again; estimated."""
        tokens, cache, kv = report.tokens, report.cache, report.bytes
        found = {tier: getattr(cache.hits, tier) for tier in TIERS}
        way = (report.method.partition(":")[0], report.prefill.partition(":")[0], report.decode.partition(":")[0])
        with self._lock:
            then = self._sums
            self._sums = replace(
                then,
                answers=_plus(then.answers, {way: 1}),
                tokens=_plus(then.tokens, {kind: getattr(tokens, kind) for kind in TOKENS}),
                lookups=_plus(then.lookups, {**found, "": cache.misses}),
                kv_bytes=_plus(then.kv_bytes, {"context_kv": kv.context_kv, "heads": kv.heads, "loaded": kv.loaded}),
                fallbacks=then.fallbacks + len(cache.fallbacks),
                pulled=then.pulled + report.decoding.pulled,
                seconds={
                    step: spent.observed(getattr(report.timings_ms, step) / 1000)
                    for step, spent in then.seconds.items()
                },
                full_seconds=then.full_seconds + full_ms / 1000,
            )

    def ended(self, outcome: Outcome) -> None:
        """A question was not answered."""
        with self._lock:
            self._sums = replace(self._sums, ended=_plus(self._sums.ended, {outcome: 1}))


def _plus(one: Mapping[K, N], other: Mapping[K, N]) -> dict[K, N]:
    return {**one, **{key: one[key] + value if key in one else value for key, value in other.items()}}


def _minus(one: Mapping[K, N], other: Mapping[K, N]) -> dict[K, N]:
    return {key: value - other[key] if key in other else value for key, value in one.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
