"""Samples of the metrics over time, for the charts. Their number is limited."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from api.runtime.engine_thread import EngineThread
from ragkv.metrics.sums import MetricSums

PERIOD = 10.0
"""Seconds between two samples."""
POINTS = 361
"""Samples that span one hour, both ends included."""


@dataclass(frozen=True)
class Point:
    """A sample of the metrics.

    Attributes:
        when: Unix seconds.
        sums: Sums since the start of the service.
        waiting: Requests in the queue at that moment.
        running: Questions being answered at that moment.
    """

    when: float
    sums: MetricSums
    waiting: int
    running: int


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
    """The samples of the last hour. Belongs to one event loop, which calls `sample` every PERIOD seconds."""

    def __init__(self, engine_thread: EngineThread):
        self._engine_thread = engine_thread
        self._points: deque[Point] = deque([self._now()], maxlen=POINTS)

    def sample(self) -> None:
        """Add a sample."""
        self._points.append(self._now())

    def spans(self) -> list[TimeSpan]:
        """Return the differences of neighbouring samples, oldest first."""
        points = list(self._points)
        return [_span(before, after) for before, after in pairwise(points)]

    def last(self, seconds: float) -> TimeSpan:
        """Return the difference between now and the latest sample that is at least `seconds` old.

        Without such a sample it is the difference to the oldest one.
        """
        now = self._now()
        before = next((p for p in reversed(self._points) if now.when - p.when >= seconds), self._points[0])
        return _span(before, now)

    def _now(self) -> Point:
        health = self._engine_thread.health()
        return Point(time.time(), self._engine_thread.metrics.sums, health["waiting"], health["running"])


def _span(before: Point, after: Point) -> TimeSpan:
    seconds = max(after.when - before.when, 1e-3)  # the clock may be set back
    return TimeSpan(after.when, seconds, after.sums.since(before.sums), after.waiting, after.running)
