"""Sums over all answers since the start of the service, for /metrics, the dashboard and `ragkv top`.

Only sums are kept, no ratios. A ratio of two differences of sums is correct for any time span; a mean of ratios is not.
The sums add up the values of the reports (ragkv/report.py), so they equal the sums of all reports exactly.

`Histogram` is not prometheus_client's: the dashboard and `ragkv top` subtract two snapshots, and `ragkv top` rebuilds
one from scraped text. Metrics of prometheus_client are mutable and separately locked, so they offer neither immutable
snapshots that are consistent across metrics nor a way to construct one from counts.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar, get_args

from ragkv.report import Report, Timings

K = TypeVar("K")
N = TypeVar("N", int, float)

Outcome = Literal["invalid", "failed", "cancelled", "expired", "refused"]
"""How a question ended without an answer: invalid request (4xx), error of the service, cancelled by the client,
deadline expired, refused because the queue was full."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_DECADE = (1, 1.5, 2, 3, 5, 7)
BOUNDS: tuple[float, ...] = (*(float(f"{digits}e{power}") for power in range(-4, 2) for digits in _DECADE), 100.0)
"""Upper bounds of the histogram buckets, in seconds. One more bucket holds the values above the last bound."""
STEPS = tuple(each.name for each in fields(Timings))
TOKENS: tuple[str, ...] = ("context", "kept", "recomputed", "question", "generated", "prefilled")
TIERS = ("gpu", "host", "store")
DRAFTS = ("drafted", "accepted")


@dataclass(frozen=True)
class Histogram:
    """An immutable histogram of durations.

    Attributes:
        counts: Observations per bucket, not cumulative. The last bucket holds the values above all BOUNDS.
        total: Sum of the observed values, in seconds.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    total: float = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observed(self, value: float) -> Histogram:
        """Return a histogram with one more observation."""
        bucket = bisect_left(BOUNDS, value)
        counts = (*self.counts[:bucket], self.counts[bucket] + 1, *self.counts[bucket + 1 :])
        return Histogram(counts, self.total + value)

    def since(self, earlier: Histogram) -> Histogram:
        """Return the observations that were made after an earlier snapshot."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(counts, self.total - earlier.total)

    def quantile(self, share: float) -> float | None:
        """Estimate a quantile like PromQL's histogram_quantile.

        The value is interpolated linearly inside its bucket and is at most the last of BOUNDS.

        Args:
            share: The quantile, 0 to 1.

        Returns:
            The estimate in seconds, or None without observations.
        """
        rank, below = share * self.count, 0
        if not self.count:
            return None
        for bucket, (count, high) in enumerate(zip(self.counts, BOUNDS, strict=False)):
            if count and below + count >= rank:
                low = BOUNDS[bucket - 1] if bucket else 0.0
                return low + (high - low) * (rank - below) / count
            below += count
        return BOUNDS[-1]


@dataclass(frozen=True)
class MetricSums:
    """An immutable snapshot of all sums.

    Attributes:
        answers: Answers by (method, prefill policy, decode policy), names without parameters.
        ended: Questions without an answer, by outcome.
        tokens: Tokens by kind; the kinds are fields of TokenCounts.
        lookups: Looked up chunks by the tier that held them, "" for none.
        kv_bytes: Bytes by kind: `context_kv`, `heads`, `loaded`.
        fallbacks: Chunks encoded again because their stored KV could not be used.
        pulled: Blocks that decoding fetched back.
        drafts: Tokens that speculation `drafted`, and those of them that were `accepted`.
        seconds: Durations by step; the steps are the fields of Timings.
        full_seconds: Estimated time to first token of the same questions with full recompute, in seconds.
        compared_seconds: Time to first token of those questions for which that was estimated, in seconds.
    """

    answers: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    ended: Mapping[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0.0))
    lookups: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys((*TIERS, ""), 0))
    kv_bytes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(("context_kv", "heads", "loaded"), 0))
    fallbacks: int = 0
    pulled: int = 0
    drafts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTS, 0))
    seconds: Mapping[str, Histogram] = field(default_factory=lambda: dict.fromkeys(STEPS, Histogram()))
    full_seconds: float = 0.0
    compared_seconds: float = 0.0

    def since(self, earlier: MetricSums) -> MetricSums:
        """Return the sums of everything that happened after an earlier snapshot."""
        return MetricSums(
            answers=_minus(self.answers, earlier.answers),
            ended=_minus(self.ended, earlier.ended),
            tokens=_minus(self.tokens, earlier.tokens),
            lookups=_minus(self.lookups, earlier.lookups),
            kv_bytes=_minus(self.kv_bytes, earlier.kv_bytes),
            fallbacks=self.fallbacks - earlier.fallbacks,
            pulled=self.pulled - earlier.pulled,
            drafts=_minus(self.drafts, earlier.drafts),
            seconds={step: now.since(earlier.seconds[step]) for step, now in self.seconds.items()},
            full_seconds=self.full_seconds - earlier.full_seconds,
            compared_seconds=self.compared_seconds - earlier.compared_seconds,
        )

    @property
    def answered(self) -> int:
        """Number of answers of all methods."""
        return sum(self.answers.values())

    @property
    def full(self) -> float | None:
        """Estimated mean time to first token with full recompute, in seconds; None if unknown."""
        return _ratio(self.full_seconds, self.answered) or None

    @property
    def sequence(self) -> float | None:
        """Kept tokens / context tokens. This ratio and the others are None before the first answer."""
        return _ratio(self.tokens["kept"], self.tokens["context"])

    @property
    def recompute(self) -> float | None:
        """Recomputed tokens / context tokens."""
        return _ratio(self.tokens["recomputed"], self.tokens["context"])

    @property
    def load(self) -> float | None:
        """Bytes read, head records included / bytes of the context's KV."""
        return _ratio(self.kv_bytes["heads"] + self.kv_bytes["loaded"], self.kv_bytes["context_kv"])

    @property
    def saved_seconds(self) -> float | None:
        """How much sooner first tokens came than with full recompute, added up, in seconds; None if that is unknown."""
        return self.full_seconds - self.compared_seconds if self.compared_seconds else None

    @property
    def cache_hit(self) -> float | None:
        """Chunks found in any tier / looked up chunks."""
        return _ratio(sum(self.lookups[tier] for tier in TIERS), sum(self.lookups.values()))

    def hit_by(self, tier: str) -> float | None:
        """Return chunks found in this tier / looked up chunks."""
        return _ratio(self.lookups[tier], sum(self.lookups.values()))


class MetricsRecorder:
    """Adds up answers, of all tenants and of each. Thread-safe; `sums` and `tenants` are immutable snapshots."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = MetricSums()
        self._tenants: Mapping[str, MetricSums] = {}

    @property
    def sums(self) -> MetricSums:
        """All sums since the start."""
        return self._sums

    @property
    def tenants(self) -> Mapping[str, MetricSums]:
        """The sums since the start of each tenant that has asked. They add up to `sums`."""
        return self._tenants

    def answered(self, report: Report, full_ms: float = 0.0, tenant: str = "") -> None:
        """Record an answer.

        Args:
            report: Report of the answer.
            full_ms: Estimated time to first token with full recompute, in milliseconds; 0 if unknown.
            tenant: The tenant that asked.
        """
        self._record(tenant, lambda sums: _with_answer(sums, report, full_ms))

    def ended(self, outcome: Outcome, tenant: str = "") -> None:
        """Record a question of a tenant that ended without an answer."""
        self._record(tenant, lambda sums: replace(sums, ended=_plus(sums.ended, {outcome: 1})))

    def _record(self, tenant: str, add: Callable[[MetricSums], MetricSums]) -> None:
        with self._lock:
            self._sums = add(self._sums)
            self._tenants = {**self._tenants, tenant: add(self._tenants.get(tenant, MetricSums()))}


def _with_answer(sums: MetricSums, report: Report, full_ms: float) -> MetricSums:
    tokens, cache, kv = report.tokens, report.cache, report.bytes
    hits = {tier: getattr(cache.hits, tier) for tier in TIERS}
    label = (report.method.partition(":")[0], report.prefill.partition(":")[0], report.decode.partition(":")[0])
    return replace(
        sums,
        answers=_plus(sums.answers, {label: 1}),
        tokens=_plus(sums.tokens, {kind: getattr(tokens, kind) for kind in TOKENS}),
        lookups=_plus(sums.lookups, {**hits, "": cache.misses}),
        kv_bytes=_plus(sums.kv_bytes, {"context_kv": kv.context_kv, "heads": kv.heads, "loaded": kv.loaded}),
        fallbacks=sums.fallbacks + len(cache.fallbacks),
        pulled=sums.pulled + report.decoding.pulled,
        drafts=_plus(sums.drafts, {kind: getattr(report.decoding.speculation, kind, 0) for kind in DRAFTS}),
        seconds={
            step: histogram.observed(getattr(report.timings_ms, step) / 1000)
            for step, histogram in sums.seconds.items()
        },
        full_seconds=sums.full_seconds + full_ms / 1000,
        compared_seconds=sums.compared_seconds + (report.timings_ms.ttft / 1000 if full_ms else 0.0),
    )


def _plus(one: Mapping[K, N], other: Mapping[K, N]) -> dict[K, N]:
    return {**one, **{key: one[key] + value if key in one else value for key, value in other.items()}}


def _minus(one: Mapping[K, N], other: Mapping[K, N]) -> dict[K, N]:
    return {key: value - other[key] if key in other else value for key, value in one.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
