"""The tally says what the reports say, for any span of time."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.metrics.sums import BOUNDS, OUTCOMES, Histogram, MetricsRecorder
from ragkv.report import Report
from tests.reports import reports, told


@given(st.lists(reports(), min_size=1, max_size=8))
def test_the_sums_are_those_of_the_reports(found: list[Report]) -> None:
    sums = told(found).sums
    assert sums.answered == len(found)
    assert sums.tokens["kept"] == sum(report.tokens.kept for report in found)
    assert sums.sequence == sums.tokens["kept"] / sum(report.tokens.context for report in found)
    assert sums.recompute == sum(report.tokens.recomputed for report in found) / sums.tokens["context"]
    assert sums.saved == sum(each.bytes.context_kv - each.bytes.heads - each.bytes.loaded for each in found)
    assert sum(sums.lookups.values()) == sum(report.cache.chunks for report in found)
    assert sums.pulled == sum(report.decoding.pulled for report in found)
    assert sums.seconds["ttft"].count == len(found)
    assert sums.seconds["ttft"].total == pytest.approx(sum(report.timings_ms.ttft for report in found) / 1000)
    assert {way[0] for way in sums.answers} <= {"full", "scout"}, "a method's fields make no new label"


@given(st.lists(reports(), max_size=5), st.lists(reports(), max_size=5))
def test_what_came_after_a_moment_is_the_difference_of_two_sums(before: list[Report], after: list[Report]) -> None:
    tally = told(before)
    then = tally.sums
    for report in after:
        tally.answered(report)
    later, alone = tally.sums.since(then), told(after).sums
    assert later.answered == len(after)
    assert (later.tokens, later.kv_bytes, later.lookups) == (alone.tokens, alone.kv_bytes, alone.lookups)
    assert later.seconds["ttft"].counts == alone.seconds["ttft"].counts
    assert then == told(before).sums, "sums that were taken do not change"


def test_a_ratio_of_nothing_is_none() -> None:
    sums = MetricsRecorder().sums
    assert (sums.sequence, sums.recompute, sums.load, sums.cache_hit) == (None,) * 4
    assert Histogram().quantile(0.5) is None


def test_questions_that_are_not_answered_are_counted_by_how_they_ended() -> None:
    tally = MetricsRecorder()
    for outcome in OUTCOMES:
        tally.ended(outcome)
    tally.ended("refused")
    assert tally.sums.ended == {**dict.fromkeys(OUTCOMES, 1), "refused": 2}
    assert tally.sums.answered == 0


def test_a_quantile_lies_in_the_bucket_of_its_rank_as_in_promql() -> None:
    spent = Histogram()
    for milliseconds in (18, 18, 18, 25):  # three in (15, 20] ms, one in (20, 30]
        spent = spent.observed(milliseconds / 1000)
    assert spent.quantile(0.5) == pytest.approx(0.015 + 0.005 * 2 / 3)
    assert spent.quantile(0.75) == pytest.approx(0.020)
    assert spent.quantile(1.0) == pytest.approx(0.030)
    assert Histogram().observed(1e9).quantile(0.5) == BOUNDS[-1]


@given(st.lists(st.floats(0, 90), min_size=1, max_size=50), st.integers(1, 100))
def test_a_quantile_lies_in_the_bucket_of_the_value_it_stands_for(values: list[float], percent: int) -> None:
    spent = Histogram()
    for value in values:
        spent = spent.observed(value)
    exact = sorted(values)[-(-percent * len(values) // 100) - 1]
    place = bisect_left(BOUNDS, exact)
    found = spent.quantile(percent / 100)
    assert found is not None
    assert (BOUNDS[place - 1] if place else 0) <= found * (1 + 1e-9)
    assert found <= BOUNDS[place] * (1 + 1e-9)
