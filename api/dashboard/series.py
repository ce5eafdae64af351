"""Samples of the metrics over time, for the overview. Their number is limited: old samples are further apart."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.metrics.sums import MetricSums

PERIOD = 10.0
"""Seconds between two samples."""
LEVELS = ((PERIOD, 361), (120.0, 721), (900.0, 673))
"""(seconds between two samples, their number): these span an hour, a day and a week, both ends included."""
_EARLY = 0.5 * PERIOD
"""A sample may come so many seconds early: timers are not exact."""


@dataclass(frozen=True)
class Point:
    """A sample of the metrics.

    Attributes:
        when: Unix seconds.
        sums: Sums since the start of the service.
        tenants: The same of each tenant.
        waiting: Requests in the queue at that moment.
        running: Questions being answered at that moment.
    """

    when: float
    sums: MetricSums
    tenants: Mapping[str, MetricSums]
    waiting: int
    running: int

    def of(self, tenant: str | None) -> MetricSums:
        """Return the sums of a tenant, or of all (None)."""
        return self.sums if tenant is None else self.tenants.get(tenant, MetricSums())


@dataclass(frozen=True)
class TimeSpan:
    """Difference of two samples.

    Attributes:
        when: Unix seconds at the end.
        seconds: Length.
        sums: Sums over this time.
        waiting: Requests in the queue at the end.
        running: Questions being answered at the end.
    """

    when: float
    seconds: float
    sums: MetricSums
    waiting: int
    running: int


class Series:
    """The samples of the last week. Belongs to one event loop, which calls `sample` every PERIOD seconds."""

    def __init__(self, engine_thread: EngineThread):
        self._engine_thread = engine_thread
        first = self._now()
        self._levels = [deque([first], maxlen=number) for _, number in LEVELS]

    def sample(self) -> None:
        """Add a sample."""
        point = self._now()
        for (seconds, _), level in zip(LEVELS, self._levels, strict=True):
            if level is self._levels[0] or abs(point.when - level[-1].when) >= seconds - _EARLY:
                level.append(point)

    def spans(self, start: float = 0.0, end: float = math.inf, tenant: str | None = None) -> list[TimeSpan]:
        """Return the differences of neighbouring samples, oldest first.

        Args:
            start: Unix seconds of the beginning.
            end: Unix seconds of the end.
            tenant: Whose sums; None for those of all.
        """
        points = [point for point in self._level(start) if start - _EARLY <= point.when <= end]
        return [_span(before, after, tenant) for before, after in pairwise(points)]

    def between(self, start: float, end: float = math.inf, tenant: str | None = None) -> TimeSpan:
        """Return the difference between two moments, by the latest samples before them.

        Where there are none, the oldest sample takes their place.

        Args:
            start: Unix seconds of the beginning.
            end: Unix seconds of the end. If it is in the future, the end is now.
            tenant: Whose sums; None for those of all.
        """
        points = list(self._level(start))
        now = self._now()
        return _span(_before(points, start), now if end >= now.when else _before(points, end), tenant)

    def last(self, seconds: float, tenant: str | None = None) -> TimeSpan:
        """Return `between` from `seconds` ago until now."""
        return self.between(time.time() - seconds, tenant=tenant)

    def _level(self, start: float) -> deque[Point]:
        """Return the samples that are closest together of those that reach back to `start`, or else furthest back."""
        oldest = max(start, min(level[0].when for level in self._levels))
        return next(level for level in self._levels if level[0].when <= oldest)

    def _now(self) -> Point:
        health, metrics = self._engine_thread.health(), self._engine_thread.metrics
        return Point(time.time(), metrics.sums, metrics.tenants, health["waiting"], health["running"])


def _before(points: Sequence[Point], moment: float) -> Point:
    return points[max(0, bisect_right(points, moment, key=lambda point: point.when) - 1)]


def _span(before: Point, after: Point, tenant: str | None) -> TimeSpan:
    seconds = max(after.when - before.when, 1e-3)  # the clock may be set back
    return TimeSpan(after.when, seconds, after.of(tenant).since(before.of(tenant)), after.waiting, after.running)
