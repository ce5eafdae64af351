"""The series of samples is bounded, and correct for any time span."""

from __future__ import annotations

from typing import Any

import pytest

from ragkv.api.dashboard import series
from ragkv.api.dashboard.series import LEVELS, PERIOD, Series
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


def test_the_spans_of_the_last_hour_hold_the_differences_of_neighbours(clock: list[float]) -> None:
    engine_thread = Counted()
    points = Series(engine_thread)  # type: ignore[arg-type]
    points_in_an_hour = LEVELS[0][1]
    for number in range(points_in_an_hour + 40):
        clock[0] += PERIOD
        for _ in range(number % 3):
            engine_thread.metrics.ended("refused")
        points.sample()
    spans = points.spans(clock[0] - 3600)
    assert len(spans) == points_in_an_hour - 1
    assert sum(each.seconds for each in spans) == 3600
    assert [each.sums.ended["refused"] for each in spans[-3:]] == [
        number % 3 for number in range(points_in_an_hour + 37, points_in_an_hour + 40)
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


def test_older_samples_are_further_apart_and_end_after_a_week(clock: list[float]) -> None:
    engine_thread = Counted()
    points = Series(engine_thread)  # type: ignore[arg-type]
    begin = clock[0]
    for _ in range(8 * 24 * 60):
        clock[0] += 60
        engine_thread.metrics.ended("failed")
        points.sample()
    day, week = points.spans(clock[0] - 86400), points.spans(clock[0] - 7 * 86400)
    assert (len(day), len(week)) == (720, 672)
    assert sum(each.sums.ended["failed"] for each in day) == 24 * 60
    assert len(points.spans(begin)) == 672, "nothing older is kept"
    middle = points.between(clock[0] - 7200, clock[0] - 3600)
    assert middle.sums.ended["failed"] == pytest.approx(60, abs=2)


def test_a_range_before_all_samples_is_empty(clock: list[float]) -> None:
    engine_thread = Counted()
    points = Series(engine_thread)  # type: ignore[arg-type]
    clock[0] += 10
    engine_thread.metrics.ended("failed")
    points.sample()
    assert points.between(1.0, 2.0).sums.ended["failed"] == 0
    assert points.spans(1.0, 2.0) == []


def test_tenants_are_told_apart_and_add_up(clock: list[float]) -> None:
    engine_thread = Counted()
    points = Series(engine_thread)  # type: ignore[arg-type]
    clock[0] += PERIOD
    for tenant in ("acme", "zeta", "acme"):
        engine_thread.metrics.ended("failed", tenant)
    counts = [points.last(PERIOD, tenant).sums.ended["failed"] for tenant in (None, "acme", "zeta", "nobody")]
    assert counts == [3, 2, 1, 0]
