"""The tally over time is bounded, and right for any span."""

from __future__ import annotations

from typing import Any

import pytest

from api.dashboard import series
from api.dashboard.series import PERIOD, POINTS, Series
from ragkv.metrics.sums import MetricsRecorder


class Counted:
    """A worker as a series sees it."""

    def __init__(self) -> None:
        self.tally = MetricsRecorder()

    def health(self) -> dict[str, Any]:
        return {"waiting": 3, "running": 2}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved."""
    now = [1000.0]
    monkeypatch.setattr(series.time, "time", lambda: now[0])
    return now


def test_spans_tell_what_came_in_them_and_are_at_most_an_hour(clock: list[float]) -> None:
    worker = Counted()
    points = Series(worker)  # type: ignore[arg-type]
    for number in range(POINTS + 40):
        clock[0] += PERIOD
        for _ in range(number % 3):
            worker.metrics.ended("refused")
        points.look()
    spans = points.spans()
    assert len(spans) == POINTS - 1
    assert sum(each.seconds for each in spans) == 3600
    assert [each.sums.ended["refused"] for each in spans[-3:]] == [
        number % 3 for number in range(POINTS + 37, POINTS + 40)
    ]
    assert (spans[-1].waiting, spans[-1].running) == (3, 2)


def test_lately_reaches_back_as_far_as_asked_and_no_further_than_the_start(clock: list[float]) -> None:
    worker = Counted()
    points = Series(worker)  # type: ignore[arg-type]
    for _ in range(10):
        worker.metrics.ended("failed")
        clock[0] += PERIOD
        points.look()
    worker.metrics.ended("failed")
    assert points.lately(PERIOD).sums.ended["failed"] == 2, "the last period, and what came since"
    assert points.lately(3600).sums.ended["failed"] == 11
    assert points.lately(3600).seconds == 100


def test_a_clock_that_is_set_back_divides_by_nothing(clock: list[float]) -> None:
    points = Series(Counted())  # type: ignore[arg-type]
    clock[0] -= 500
    points.look()
    assert points.spans()[0].seconds > 0
