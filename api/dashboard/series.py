"""Series: the tally over time, for the charts. A bounded number of points, however much was asked."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from api.runtime.engine_thread import EngineThread
from ragkv.metrics.sums import MetricSums

PERIOD = 10.0
"""Seconds between two points."""
POINTS = 361
"""An hour, from its first moment to its last."""


@dataclass(frozen=True)
class Point:
    """when: Unix seconds · sums: since the start · waiting, running: questions at that moment."""

    when: float
    sums: MetricSums
    waiting: int
    running: int


@dataclass(frozen=True)
class TimeSpan:
    """What came between two points. when: Unix seconds at its end · seconds: how long ·
    waiting, running: at its end."""

    when: float
    seconds: float
    sums: MetricSums
    waiting: int
    running: int


class Series:
    """Of one loop, in which `look` is called every PERIOD."""

    def __init__(self, worker: EngineThread):
        self._worker = worker
        self._points: deque[Point] = deque([self._now()], maxlen=POINTS)

    def look(self) -> None:
        """Add a point."""
        self._points.append(self._now())

    def spans(self) -> list[TimeSpan]:
        """Between neighbours, oldest first."""
        points = list(self._points)
        return [_span(before, after) for before, after in pairwise(points)]

    def lately(self, seconds: float) -> TimeSpan:
        """From the last point that is at least so long ago until now; from the oldest one, where none is."""
        now = self._now()
        before = next((p for p in reversed(self._points) if now.when - p.when >= seconds), self._points[0])
        return _span(before, now)

    def _now(self) -> Point:
        health = self._worker.health()
        return Point(time.time(), self._worker.metrics.sums, health["waiting"], health["running"])


def _span(before: Point, after: Point) -> TimeSpan:
    seconds = max(after.when - before.when, 1e-3)  # somebody may set the clock back
    return TimeSpan(after.when, seconds, after.sums.since(before.sums), after.waiting, after.running)
