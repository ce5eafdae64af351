"""The sums equal those of the reports, for any time span."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.metrics.sums import BOUNDS, OUTCOMES, Histogram, MetricsRecorder
from ragkv.report import Report
from tests.reports import recorded, reports


@given(st.lists(reports(), min_size=1, max_size=8))
def test_the_sums_are_those_of_the_reports(answered: list[Report]) -> None:
    sums = recorded(answered).sums
    assert sums.answered == len(answered)
    assert sums.tokens["kept"] == sum(report.tokens.kept for report in answered)
    assert sums.sequence == sums.tokens["kept"] / sum(report.tokens.context for report in answered)
    assert sums.recompute == sum(report.tokens.recomputed for report in answered) / sums.tokens["context"]
    assert sum(sums.lookups.values()) == sum(report.cache.chunks for report in answered)
    assert sums.pulled == sum(report.decoding.pulled for report in answered)
    drafts = [report.decoding.speculation for report in answered if report.decoding.speculation is not None]
    assert sums.drafts == {kind: sum(getattr(each, kind) for each in drafts) for kind in ("drafted", "accepted")}
    assert sums.seconds["ttft"].count == len(answered)
    assert sums.seconds["ttft"].total == pytest.approx(sum(report.timings_ms.ttft for report in answered) / 1000)
    assert {method for method, *_ in sums.answers} <= {"full", "scout"}, (
        "the parameters of a method are not part of the label"
    )


@given(st.lists(reports(), max_size=5), st.lists(reports(), max_size=5))
def test_since_is_the_difference_of_two_snapshots(before: list[Report], after: list[Report]) -> None:
    recorder = recorded(before)
    earlier = recorder.sums
    for report in after:
        recorder.answered(report)
    later, alone = recorder.sums.since(earlier), recorded(after).sums
    assert later.answered == len(after)
    assert (later.tokens, later.kv_bytes, later.lookups) == (alone.tokens, alone.kv_bytes, alone.lookups)
    assert later.drafts == alone.drafts
    assert later.seconds["ttft"].counts == alone.seconds["ttft"].counts
    assert earlier == recorded(before).sums, "a snapshot does not change"


def test_ratios_are_none_without_answers() -> None:
    sums = MetricsRecorder().sums
    assert (sums.sequence, sums.recompute, sums.load, sums.cache_hit) == (None,) * 4
    assert Histogram().quantile(0.5) is None


def test_questions_without_an_answer_are_counted_by_outcome() -> None:
    recorder = MetricsRecorder()
    for outcome in OUTCOMES:
        recorder.ended(outcome)
    recorder.ended("refused")
    assert recorder.sums.ended == {**dict.fromkeys(OUTCOMES, 1), "refused": 2}
    assert recorder.sums.answered == 0


def test_quantiles_are_interpolated_like_in_promql() -> None:
    histogram = Histogram()
    for milliseconds in (18, 18, 18, 25):  # three in (15, 20] ms, one in (20, 30]
        histogram = histogram.observed(milliseconds / 1000)
    assert histogram.quantile(0.5) == pytest.approx(0.015 + 0.005 * 2 / 3)
    assert histogram.quantile(0.75) == pytest.approx(0.020)
    assert histogram.quantile(1.0) == pytest.approx(0.030)
    assert Histogram().observed(1e9).quantile(0.5) == BOUNDS[-1]


@given(st.lists(st.floats(0, 90), min_size=1, max_size=50), st.integers(1, 100))
def test_a_quantile_lies_in_the_bucket_of_the_exact_value(values: list[float], percent: int) -> None:
    histogram = Histogram()
    for value in values:
        histogram = histogram.observed(value)
    exact = sorted(values)[-(-percent * len(values) // 100) - 1]
    bucket = bisect_left(BOUNDS, exact)
    estimate = histogram.quantile(percent / 100)
    assert estimate is not None
    assert (BOUNDS[bucket - 1] if bucket else 0) <= estimate * (1 + 1e-9)
    assert estimate <= BOUNDS[bucket] * (1 + 1e-9)


def test_the_sums_of_the_tenants_add_up_to_those_of_all() -> None:
    recorder = MetricsRecorder()
    recorder.ended("failed", "acme")
    recorder.ended("failed", "zeta")
    recorder.ended("expired", "acme")
    assert recorder.sums.ended["failed"] == 2
    assert {tenant: dict(sums.ended) for tenant, sums in recorder.tenants.items()} == {
        "acme": dict.fromkeys(OUTCOMES, 0) | {"failed": 1, "expired": 1},
        "zeta": dict.fromkeys(OUTCOMES, 0) | {"failed": 1},
    }


@given(st.lists(reports(), min_size=1, max_size=6))
def test_saved_time_counts_the_answers_alone_whose_full_prefill_was_estimated(answered: list[Report]) -> None:
    recorder = MetricsRecorder()
    assert recorder.sums.saved_seconds is None
    for number, report in enumerate(answered):
        recorder.answered(report, 5000.0 if number % 2 == 0 else 0.0)
    compared = answered[::2]
    expected = sum(5.0 - report.timings_ms.ttft / 1000 for report in compared)
    known = any(report.timings_ms.ttft for report in compared)
    assert recorder.sums.saved_seconds == (pytest.approx(expected) if known else None)
