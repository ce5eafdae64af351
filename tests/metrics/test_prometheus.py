"""Sums that went out as Prometheus text come back as they were."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from ragkv.metrics.prometheus import families, read
from ragkv.metrics.sums import OUTCOMES, Histogram, MetricsRecorder, MetricSums
from ragkv.report import Report
from tests.reports import reports, told


class _Only(Collector):
    def __init__(self, sums: MetricSums):
        self.sums = sums

    def collect(self):
        return families(self.sums)


def text(sums: MetricSums) -> str:
    """As it is scraped."""
    registry = CollectorRegistry()
    registry.register(_Only(sums))
    return generate_latest(registry).decode()


@given(st.lists(reports(), max_size=5), st.lists(st.sampled_from(OUTCOMES), max_size=5))
def test_sums_come_back_to_the_digit(found: list[Report], ended: list[str]) -> None:
    tally = told(found)
    for outcome in ended:
        tally.ended(outcome)
    seen = read(text(tally.sums))
    assert seen.sums == tally.sums
    assert (seen.documents, seen.model, seen.wrong) == (None, "", ()), "what is not there is not known"


def test_what_has_not_happened_yet_is_there_with_nothing() -> None:
    said = text(MetricsRecorder().sums)
    for line in (
        'ragkv_tokens_total{kind="recomputed"} 0.0',
        'ragkv_chunk_lookups_total{result="hit",tier="gpu"} 0.0',
        'ragkv_chunk_lookups_total{result="miss",tier="none"} 0.0',
        'ragkv_kv_bytes_total{source="loaded"} 0.0',
        'ragkv_questions_unanswered_total{outcome="expired"} 0.0',
        'ragkv_step_seconds_count{step="ttft"} 0.0',
        "ragkv_fallbacks_total 0.0",
    ):
        assert f"{line}\n" in said
    assert "\nragkv_answers_total{" not in said


def test_buckets_are_added_up_as_the_format_wants_it() -> None:
    spent = Histogram().observed(0.018).observed(0.018).observed(0.025).observed(1e6)
    said = text(MetricSums(seconds={"ttft": spent}))
    for le, count in (("0.015", 0), ("0.02", 2), ("0.03", 3), ("100.0", 3), ("+Inf", 4)):
        assert f'ragkv_step_seconds_bucket{{le="{le}",step="ttft"}} {count}.0\n' in said


@given(st.text())
def test_any_other_text_is_refused_with_one_kind_of_error(other: str) -> None:
    with suppress(ValueError):
        read(other)
        pytest.fail("read as metrics")


@pytest.mark.parametrize(
    "said", ["", "up 1", 'ragkv_tokens_total{sort="x"} 1', "ragkv_tokens_total{", "ragkv_tokens_total"]
)
def test_what_is_not_of_a_ragkv_is_refused(said: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the parser says it without words
        read(said)


def test_other_buckets_are_refused_and_not_misread() -> None:
    with pytest.raises(ValueError, match="other buckets"):
        read(text(MetricsRecorder().sums).replace('le="0.015"', 'le="0.016"'))
