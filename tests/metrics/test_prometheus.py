"""Sums written as Prometheus text are parsed back unchanged."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from ragkv.metrics.prometheus import families, parse_metrics
from ragkv.metrics.sums import OUTCOMES, Histogram, MetricsRecorder, MetricSums
from ragkv.report import Report
from tests.reports import recorded, reports


class SumsCollector(Collector):
    def __init__(self, sums: MetricSums):
        self.sums = sums

    def collect(self):
        return families(self.sums)


def text(sums: MetricSums) -> str:
    """The text that a scrape returns."""
    registry = CollectorRegistry()
    registry.register(SumsCollector(sums))
    return generate_latest(registry).decode()


@given(st.lists(reports(), max_size=5), st.lists(st.sampled_from(OUTCOMES), max_size=5))
def test_sums_are_parsed_back_exactly(answered: list[Report], ended: list[str]) -> None:
    recorder = recorded(answered)
    for outcome in ended:
        recorder.ended(outcome)
    scraped = parse_metrics(text(recorder.sums))
    assert scraped.sums == recorder.sums
    assert (scraped.documents, scraped.model, scraped.wrong) == (None, "", ()), "missing metrics are unknown"


def test_series_start_at_zero() -> None:
    exposed = text(MetricsRecorder().sums)
    for line in (
        'ragkv_tokens_total{kind="recomputed"} 0.0',
        'ragkv_chunk_lookups_total{result="hit",tier="gpu"} 0.0',
        'ragkv_chunk_lookups_total{result="miss",tier="none"} 0.0',
        'ragkv_kv_bytes_total{source="loaded"} 0.0',
        'ragkv_questions_unanswered_total{outcome="expired"} 0.0',
        'ragkv_step_seconds_count{step="ttft"} 0.0',
        'ragkv_draft_tokens_total{kind="accepted"} 0.0',
        "ragkv_fallbacks_total 0.0",
    ):
        assert f"{line}\n" in exposed
    assert "\nragkv_answers_total{" not in exposed


def test_buckets_are_cumulative() -> None:
    histogram = Histogram().observed(0.018).observed(0.018).observed(0.025).observed(1e6)
    exposed = text(MetricSums(seconds={"ttft": histogram}))
    for le, count in (("0.015", 0), ("0.02", 2), ("0.03", 3), ("100.0", 3), ("+Inf", 4)):
        assert f'ragkv_step_seconds_bucket{{le="{le}",step="ttft"}} {count}.0\n' in exposed


@given(st.text())
def test_any_other_text_raises_value_error(other: str) -> None:
    with suppress(ValueError):
        parse_metrics(other)
        pytest.fail("parsed as metrics")


@pytest.mark.parametrize(
    "scraped", ["", "up 1", 'ragkv_tokens_total{sort="x"} 1', "ragkv_tokens_total{", "ragkv_tokens_total"]
)
def test_metrics_of_another_service_are_refused(scraped: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the parser gives no message
        parse_metrics(scraped)


def test_other_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="other buckets"):
        parse_metrics(text(MetricsRecorder().sums).replace('le="0.015"', 'le="0.016"'))


def test_the_sums_of_replicas_are_added_up() -> None:
    one, two = (
        'ragkv_tokens_total{{kind="context",replica="{0}"}} {1}\nragkv_queue_places{{replica="{0}"}} 32\n'
        'process_start_time_seconds{{replica="{0}"}} {1}\nragkv_ready{{check="store",replica="{0}"}} {2}\n'.format(
            *each
        )
        for each in (("a", 100, 1), ("b", 250, 0))
    )
    scraped = parse_metrics(one + two)
    assert scraped.sums.tokens["context"] == 350
    assert (scraped.queue_places, scraped.started, scraped.wrong) == (64, 100.0, ("store",))
