"""The overview, `ragkv top` and Grafana show the same figures under the same names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragkv.api.dashboard.series import TimeSpan
from ragkv.api.dashboard.tiles import figures
from ragkv.cli.top import TopRecord, frame
from ragkv.engine.service_rules import rule_report
from ragkv.metrics.figures import FIGURES, NONE, duration, shown
from ragkv.metrics.prometheus import ScrapedMetrics
from ragkv.metrics.sums import MetricsRecorder, MetricSums
from ragkv.timing import StepTimer
from ragkv.types import HourPrice
from tools.grafana.panels import TILES

HEALTH = {"waiting": 0, "queue": 32, "running": 0, "price": "36 EUR"}
FIGURE = {each.name: each for each in FIGURES}


def sums() -> MetricSums:
    """Return the sums of two answers."""
    recorder, report = MetricsRecorder(), rule_report("service", "tiny", StepTimer())
    for ttft in (100.0, 300.0):
        recorder.answered(replace(report, timings_ms=replace(report.timings_ms, ttft=ttft)), 2200.0)
    return recorder.sums


def test_the_three_places_show_the_same_names_in_the_same_order() -> None:
    names = [each.name for each in FIGURES]
    tiles = figures(sums(), TimeSpan(1.0, 1.0, sums(), 0, 0), HEALTH)
    assert list(tiles)[: len(names)] == names
    assert [panel.title for panel in TILES] == names
    assert [panel.says for panel in TILES] == [each.says for each in FIGURES]


def test_the_overview_and_top_write_the_same_values() -> None:
    from rich.console import Console

    record = TopRecord()
    record.add(0.0, ScrapedMetrics(sums(), 0.0, 0, 0, 32, 0, 0, (), "tiny", "scout", HourPrice(36.0, "EUR")))
    console = Console(width=100, record=True)
    console.print(frame(record, "url", ""))
    lines = console.export_text().splitlines()
    for name, content in list(figures(sums(), TimeSpan(1.0, 1.0, sums(), 0, 0), HEALTH).items())[: len(FIGURES)]:
        assert any(line.split("  ")[0] == name and line.rstrip().endswith(content.value) for line in lines), name


def test_nothing_is_said_of_saved_bytes() -> None:
    assert not [each.name for each in FIGURES if "bytes saved" in each.name.lower()]


def test_money_is_the_saved_time_at_the_price_of_an_hour() -> None:
    assert sums().saved_seconds == pytest.approx(4.0)
    assert shown(FIGURE["Money saved"], sums(), HourPrice(36.0, "EUR")) == "0.04 EUR"
    assert shown(FIGURE["Money saved"], sums(), None) == NONE
    assert shown(FIGURE["Time saved"], sums(), None) == "4.00 s"
    assert shown(FIGURE["Time saved"], MetricSums(), None) == NONE


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, NONE), (0.162, "162 ms"), (1.66, "1.66 s"), (754.0, "12.6 min"), (7200.0, "2.0 h"), (-3.0, "-3.00 s")],
)
def test_a_time_is_written_in_its_own_unit(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("2.50 USD", HourPrice(2.5, "USD")),
        ("3€", HourPrice(3.0, "€")),
        ("4", HourPrice(4.0)),
        ("0", None),
        ("cheap", None),
        ("", None),
        ("1e9 USD", None),
    ],
)
def test_a_price_is_an_amount_and_a_currency(text: str, price: HourPrice | None) -> None:
    assert HourPrice.read(text) == price
    assert price is None or HourPrice.read(str(price)) == price
