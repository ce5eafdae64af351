"""Tiles with figures, since the start or for a recent time span, and charts of the last hour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from api.dashboard.formatting import count, duration, percent, size
from api.dashboard.series import Series, TimeSpan
from api.runtime.engine_thread import EngineThread
from ragkv.metrics.sums import TIERS, MetricSums

SPANS = {0: "since the start", 3600: "the last hour", 300: "five minutes"}
"""Time spans of the tiles in seconds; 0 means since the start."""
RATE_SECONDS = 60
"""Time span of the rates in seconds."""
# Colours of Okabe and Ito, which people with any colour vision can tell apart. Each line has its own dashes as well.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
DASHES: tuple[str | list[int], ...] = ("solid", [8, 4], [2, 3], [12, 3, 2, 3])


@dataclass(frozen=True)
class Figure:
    """Content of a tile.

    Attributes:
        value: The number as text.
        note: Details below the number.
        exact: The number itself, for programs; None if there is none.
    """

    value: str
    note: str
    exact: float | None = None


def figures(sums: MetricSums, rate: TimeSpan, health: dict[str, Any]) -> dict[str, Figure]:
    """Return the content of every tile by its name.

    Args:
        sums: Sums over the chosen time span.
        rate: Time span of the rates.
        health: Health of the engine thread.
    """
    tokens, kv, ttft = sums.tokens, sums.kv_bytes, sums.seconds["ttft"]
    low, high = ttft.quantile(0.5), ttft.quantile(0.95)
    hits = " · ".join(f"{tier} {count(sums.lookups[tier])}" for tier in TIERS)
    full = f" · full recompute, estimated: {duration(sums.full)}" if sums.full else ""
    generated = rate.sums.tokens["generated"] / rate.seconds
    unanswered = " · ".join(f"{how} {number}" for how, number in sums.ended.items() if number)
    read = kv["heads"] + kv["loaded"]
    return {
        "Cache hits": Figure(percent(sums.cache_hit), f"{hits} · missed {count(sums.lookups[''])}", sums.cache_hit),
        "Recomputed": Figure(
            percent(sums.recompute),
            f"{count(tokens['recomputed'])} of {count(tokens['context'])} tokens",
            sums.recompute,
        ),
        "Kept": Figure(
            percent(sums.sequence), f"{count(tokens['kept'])} of {count(tokens['context'])} tokens", sums.sequence
        ),
        "Loaded": Figure(percent(sums.load), f"{size(read)} of {size(kv['context_kv'])}", sums.load),
        "Bytes saved": Figure(size(sums.saved), f"in {count(sums.answered)} answers", float(sums.saved)),
        "First token": Figure(f"{duration(low)} / {duration(high)}", f"half / 95%{full}", low),
        "Tokens a second": Figure(
            f"{generated:.1f}", f"{60 * rate.sums.answered / rate.seconds:.1f} answers a minute", generated
        ),
        "Waiting": Figure(
            f"{health['waiting']} of {health['queue']}",
            f"{health['running']} running" + (f" · {unanswered}" if unanswered else ""),
            float(health["waiting"]),
        ),
    }


class Tiles:
    """The tiles of the overview."""

    def __init__(self, engine_thread: EngineThread, series: Series):
        self._engine_thread, self._series = engine_thread, series
        with ui.row().classes("line"):
            ui.label("What the answers reused").classes("title").props("role=heading aria-level=2")
            self._span = ui.toggle(SPANS, value=0, on_change=self.refresh).props("dense no-caps unelevated")
        with ui.element("div").classes("tiles"):
            self._tiles = {name: _tile(name) for name in figures(*self._sources())}
        self.refresh()

    def refresh(self) -> None:
        """Show the current state."""
        for name, figure in figures(*self._sources()).items():
            self._tiles[name](figure)

    def _sources(self) -> tuple[MetricSums, TimeSpan, dict[str, Any]]:
        seconds = self._span.value
        sums = self._series.last(seconds).sums if seconds else self._engine_thread.metrics.sums
        return sums, self._series.last(RATE_SECONDS), self._engine_thread.health()


def _tile(name: str) -> Callable[[Figure], None]:
    with ui.element("section").classes("tile").props(f'aria-label="{name}"') as tile:
        ui.label(name).classes("name")
        value, note = ui.label().classes("value"), ui.label().classes("note")

    def show(figure: Figure) -> None:
        value.set_text(figure.value)
        note.set_text(figure.note)
        if tile.props.get("data-exact") != repr(figure.exact):
            tile.props(f'data-exact="{figure.exact!r}"')

    return show


class Charts:
    """The charts of the overview: the last hour."""

    def __init__(self, series: Series):
        self._series = series
        self._shown = 0.0
        with ui.element("div").classes("charts"):
            self._ratios = _chart("Ratios", "%", ("cache hits", "recomputed", "kept", "loaded"))
            self._spans = _chart("First token", "ms", ("half", "95%", "full, estimated"))
            self._rates = _chart("Traffic", "", ("tokens a second", "waiting", "running"))
        self.refresh()

    def refresh(self) -> None:
        """Show the samples if there is a new one."""
        spans = self._series.spans()
        if spans and spans[-1].when == self._shown:
            return
        self._shown = spans[-1].when if spans else 0.0
        _draw(self._ratios, spans, _ratios)
        _draw(self._spans, spans, _latencies)
        _draw(self._rates, spans, _rates)


def _ratios(each: TimeSpan) -> list[float | None]:
    sums = each.sums
    return [_scaled(100, ratio) for ratio in (sums.cache_hit, sums.recompute, sums.sequence, sums.load)]


def _latencies(each: TimeSpan) -> list[float | None]:
    ttft = each.sums.seconds["ttft"]
    return [_scaled(1000, seconds) for seconds in (ttft.quantile(0.5), ttft.quantile(0.95), each.sums.full)]


def _rates(each: TimeSpan) -> list[float | None]:
    return [_scaled(1, each.sums.tokens["generated"] / each.seconds), each.waiting, each.running]


def _scaled(factor: float, value: float | None) -> float | None:
    return None if value is None else round(factor * value, 1)


def _draw(chart: ui.echart, spans: list[TimeSpan], values: Callable[[TimeSpan], list[float | None]]) -> None:
    rows = [(1000 * each.when, values(each)) for each in spans]
    for column, line in enumerate(chart.options["series"]):
        line["data"] = [[when, row[column]] for when, row in rows]
    if rows:
        chart.options["xAxis"] |= {"min": rows[0][0], "max": rows[-1][0]}
    chart.update()


def _chart(title: str, unit: str, names: tuple[str, ...]) -> ui.echart:
    lines = [
        {
            "name": name,
            "type": "line",
            "showSymbol": False,
            "connectNulls": False,
            "lineStyle": {"type": dash, "width": 2},
            "data": [],
        }
        for name, dash in zip(names, DASHES, strict=False)
    ]
    grey = "#808080"  # legible on light and dark
    options = {
        "animation": False,
        "aria": {"enabled": True, "label": {"description": f"{title} over the last hour: {', '.join(names)}."}},
        "color": list(COLOURS),
        "legend": {"type": "scroll", "top": 0, "left": 0, "itemWidth": 22, "textStyle": {"color": grey}},
        "grid": {"left": 44, "right": 12, "top": 36, "bottom": 24},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "time", "axisLabel": {"color": grey, "hideOverlap": True}, "splitLine": {"show": False}},
        "yAxis": {
            "type": "value",
            "min": 0,
            "axisLabel": {"color": grey},
            "splitLine": {"lineStyle": {"opacity": 0.3}},
        },
        "series": lines,
    }
    with ui.element("section").classes("card").props(f'aria-label="{title}"'):
        ui.label(f"{title}{f', {unit}' if unit else ''}").classes("name")
        return ui.echart(options, renderer="svg").classes("chart").props("role=img")
