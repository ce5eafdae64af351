"""Tiles with figures over a range of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from ragkv.api.dashboard.formatting import count, duration, percent, quantity, size
from ragkv.api.dashboard.ranges import TimeRange
from ragkv.api.dashboard.series import Series, TimeSpan
from ragkv.api.dashboard.terms import Term
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.metrics.sums import TIERS, MetricSums

RATE_SECONDS = 60
"""Time span of the rates in seconds."""


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
        "Bytes saved": Figure(size(sums.saved), f"in {quantity(sums.answered, 'answer')}", float(sums.saved)),
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
        self._tiles: dict[str, Callable[[Figure], None]] = {}
        self._element = ui.element("div").classes("tiles")

    def refresh(self, shown: TimeRange, tenant: str | None) -> None:
        """Show the figures of a range of time, of a tenant or of all (None)."""
        metrics = self._engine_thread.metrics
        if shown.whole:
            sums = metrics.sums if tenant is None else metrics.tenants.get(tenant, MetricSums())
        else:
            sums = self._series.between(*shown.moments(), tenant=tenant).sums
        rate = self._series.last(RATE_SECONDS, tenant)
        found = figures(sums, rate, self._engine_thread.health())
        if not self._tiles:
            with self._element:
                self._tiles = {name: _tile(name) for name in found}
        for name, figure in found.items():
            self._tiles[name](figure)


def _tile(name: str) -> Callable[[Figure], None]:
    with ui.element("section").classes("tile").props(f'aria-label="{name}"') as tile:
        Term(name).classes("name")
        value, note = ui.label().classes("value"), ui.label().classes("note")

    def show(figure: Figure) -> None:
        value.set_text(figure.value)
        note.set_text(figure.note)
        if tile.props.get("data-exact") != repr(figure.exact):
            tile.props(f'data-exact="{figure.exact!r}"')

    return show
