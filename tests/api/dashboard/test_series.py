"""The series of samples is bounded, and correct for any time span."""

from __future__ import annotations

from typing import Any

import pytest

from api.dashboard import series
from api.dashboard.series import PERIOD, POINTS, Series
from ragkv.metrics.sums import MetricsRecorder


class Counted:
    """A stub of EngineThread with what a series reads."""

    def __init__(self) -> None:
        self.metrics = MetricsRecorder()

    def health(self) -> dict[str, Any]:
        return {"waiting": 3, "running": 2}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(series.time, "time", lambda: now[0])
    return now


def test_spans_hold_differences_and_cover_one_hour_at_most(clock: list[float]) -> None:
    engine_thread = Counted()
    points = Series(engine_thread)  # type: ignore[arg-type]
    for number in range(POINTS + 40):
        clock[0] += PERIOD
        for _ in range(number % 3):
            engine_thread.metrics.ended("refused")
        points.sample()
    spans = points.spans()
    assert len(spans) == POINTS - 1
    assert sum(each.seconds for each in spans) == 3600
    assert [each.sums.ended["refused"] for each in spans[-3:]] == [
        number % 3 for number in range(POINTS + 37, POINTS + 40)
    ]
    assert (spans[-1].waiting, spans[-1].running) == (3, 2)


def test_the_last_span_reaches_back_as_requested_or_to_the_start(clock: list[float]) -> None:
    engine_thread = Counted()
    points = Series(engine_thread)  # type: ignore[arg-type]
    for _ in range(10):
        engine_thread.metrics.ended("failed")
        clock[0] += PERIOD
        points.sample()
    engine_thread.metrics.ended("failed")
    assert points.last(PERIOD).sums.ended["failed"] == 2, "the last period, and what came since"
    assert points.last(3600).sums.ended["failed"] == 11
    assert points.last(3600).seconds == 100


def test_a_clock_set_back_does_not_divide_by_zero(clock: list[float]) -> None:
    points = Series(Counted())  # type: ignore[arg-type]
    clock[0] -= 500
    points.sample()
    assert points.spans()[0].seconds > 0
