"""Charts of the overview: ratios, times to the first token, and traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import ui

from ragkv.api.dashboard.ranges import TimeRange
from ragkv.api.dashboard.series import LEVELS, Series, TimeSpan
from ragkv.api.dashboard.terms import Term

# Colours of Okabe and Ito, which people with any colour vision can tell apart. Each line has its own dashes as well.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
DASHES: tuple[str | list[int], ...] = ("solid", [8, 4], [2, 3], [12, 3, 2, 3])
GAP = 2.5
"""Samples that are further apart than so many times the usual distance have a gap between them."""
RECENT = 3600.0
"""Seconds that the charts show where the tiles show the time since the start, and that is longer."""
_PERCENT = {"type": "value", "min": 0, "max": 100}
_LINEAR = {"type": "value", "min": 0}
# One slow answer must not flatten the others.
_LOGARITHMIC = {"type": "log"}

Values = list[float | None]


class Charts:
    """The charts of the overview."""

    def __init__(self, series: Series):
        self._series = series
        self._shown: object = None
        with ui.element("div").classes("charts"):
            self._ratios = _chart("Ratios", "%", ("cache hits", "recomputed", "kept", "loaded"), _PERCENT)
            self._times = _chart("First token", "ms", ("median", "95%", "full prefill, estimated"), _LOGARITHMIC)
            self._traffic = _chart("Traffic", "", ("tokens a second", "waiting", "running"), _LINEAR)

    def refresh(self, shown: TimeRange, tenant: str | None) -> None:
        """Show a range of time, of a tenant or of all (None), if there is a new sample or another choice."""
        spans = self._series.spans(*(TimeRange(RECENT) if shown.whole else shown).moments(), tenant=tenant)
        state = (shown, tenant, spans[-1].when if spans else 0.0)
        if state == self._shown:
            return
        self._shown = state
        _draw(self._ratios, spans, _ratios)
        _draw(self._times, spans, _latencies)
        _draw(self._traffic, spans, _rates)


def _ratios(each: TimeSpan) -> Values:
    sums = each.sums
    return [_scaled(100, ratio) for ratio in (sums.cache_hit, sums.recompute, sums.sequence, sums.load)]


def _latencies(each: TimeSpan) -> Values:
    ttft = each.sums.seconds["ttft"]
    return [_scaled(1000, seconds) for seconds in (ttft.quantile(0.5), ttft.quantile(0.95), each.sums.full)]


def _rates(each: TimeSpan) -> Values:
    return [_scaled(1, each.sums.tokens["generated"] / each.seconds), each.waiting, each.running]


def _scaled(factor: float, value: float | None) -> float | None:
    return None if value is None else round(factor * value, 1)


def _draw(chart: ui.echart, spans: Sequence[TimeSpan], values: Callable[[TimeSpan], Values]) -> None:
    rows = with_gaps([(1000 * each.when, values(each)) for each in spans], 1000 * _distance(spans))
    for column, line in enumerate(chart.options["series"]):
        line["data"] = points([(when, row[column] if row else None) for when, row in rows])
    if rows:
        chart.options["xAxis"] |= {"min": rows[0][0], "max": rows[-1][0]}
    chart.update()


def _distance(spans: Sequence[TimeSpan]) -> float:
    """Return the usual seconds between these samples."""
    middle = sorted(each.seconds for each in spans)[len(spans) // 2] if spans else 0.0
    return min((seconds for seconds, _ in LEVELS), key=lambda seconds: abs(seconds - middle))


def with_gaps(rows: Sequence[tuple[float, Values]], distance: float) -> list[tuple[float, Values]]:
    """Put an empty row where samples are missing, so that no line is drawn across.

    Args:
        rows: (moment, values), ascending.
        distance: Usual distance of two moments.
    """
    found: list[tuple[float, Values]] = []
    for when, values in rows:
        if found and when - found[-1][0] > GAP * distance:
            found.append((when - distance, []))
        found.append((when, values))
    return found


def points(values: Sequence[tuple[float, float | None]]) -> list[dict[str, Any]]:
    """Return a line for ECharts. A value without neighbours has no line, so it is drawn as a dot."""
    found = []
    for at, (when, value) in enumerate(values):
        beside = [values[near][1] for near in (at - 1, at + 1) if 0 <= near < len(values)]
        alone = value is not None and all(each is None for each in beside)
        found.append({"value": [when, value], "symbol": "circle" if alone else "none"})
    return found


def _chart(title: str, unit: str, names: tuple[str, ...], axis: dict[str, Any]) -> ui.echart:
    lines = [
        {
            "name": name,
            "type": "line",
            "symbolSize": 6,
            "connectNulls": False,
            "lineStyle": {"type": dash, "width": 2},
            "data": [],
        }
        for name, dash in zip(names, DASHES, strict=False)
    ]
    grey = "#808080"  # style.css replaces it by one that is legible in the colour mode
    options = {
        "animation": False,
        "aria": {"enabled": True, "label": {"description": f"{title} over time: {', '.join(names)}."}},
        "color": list(COLOURS),
        "legend": {
            "top": 0,
            "left": 0,
            "itemWidth": 26,
            "itemGap": 8,
            "icon": "path://M0 4H12V6H0Z",
            "textStyle": {"color": grey, "fontSize": 11},
        },
        "grid": {"left": 44, "right": 26, "top": 42, "bottom": 24},
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {"type": "time", "axisLabel": {"color": grey, "hideOverlap": True}, "splitLine": {"show": False}},
        "yAxis": {"axisLabel": {"color": grey}, "splitLine": {"lineStyle": {"opacity": 0.3}}, **axis},
        "series": lines,
    }
    with ui.element("section").classes("card").props(f'aria-label="{title}"'):
        with ui.element("div").classes("name"):
            Term(title)
            ui.label(unit)
        return ui.echart(options, renderer="svg").classes("chart").props("role=img")
