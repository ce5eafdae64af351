"""Tiles with figures over a range of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from ragkv.api.dashboard.formatting import count, duration, quantity, size
from ragkv.api.dashboard.ranges import TimeRange
from ragkv.api.dashboard.series import Series, TimeSpan
from ragkv.api.dashboard.terms import Term
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.metrics.figures import FIGURES, MetricFigure, shown
from ragkv.metrics.sums import TIERS, MetricSums
from ragkv.types import HourPrice

RATE_SECONDS = 60
"""Time span of the rates in seconds."""


@dataclass(frozen=True)
class TileContent:
    """Content of a tile.

    Attributes:
        value: The number as text.
        note: Details below the number.
        exact: The number itself, for programs; None if there is none.
    """

    value: str
    note: str
    exact: float | None = None


def figures(sums: MetricSums, rate: TimeSpan, health: dict[str, Any]) -> dict[str, TileContent]:
    """Return the content of every tile by its name.

    Args:
        sums: Sums over the chosen time span.
        rate: Time span of the rates.
        health: Health of the engine thread.
    """
    price = HourPrice.read(health.get("price", ""))
    notes = _notes(sums, price)
    found = {
        each.name: TileContent(shown(each, sums, price), notes.get(each.name, ""), _exact(each, sums, price))
        for each in FIGURES
    }
    generated = rate.sums.tokens["generated"] / rate.seconds
    unanswered = " · ".join(f"{how} {number}" for how, number in sums.ended.items() if number)
    return {
        **found,
        "Tokens a second": TileContent(
            f"{generated:.1f}", f"{60 * rate.sums.answered / rate.seconds:.1f} answers a minute", generated
        ),
        "Waiting": TileContent(
            f"{health['waiting']} of {health['queue']}",
            f"{health['running']} running" + (f" · {unanswered}" if unanswered else ""),
            float(health["waiting"]),
        ),
    }


def _notes(sums: MetricSums, price: HourPrice | None) -> dict[str, str]:
    """Return the details below some figures, by their names."""
    tokens, kv = sums.tokens, sums.kv_bytes
    hits = " · ".join(f"{tier} {count(sums.lookups[tier])}" for tier in TIERS)
    each = sums.saved_seconds / sums.answered if sums.saved_seconds is not None and sums.answered else None
    return {
        "Time saved": f"in {quantity(sums.answered, 'answer')}"
        + ("" if each is None else f", {duration(each)} in each"),
        "Money saved": f"at {price} an hour" if price else "tell the price of an hour above",
        "Cache hits": f"{hits} · missed {count(sums.lookups[''])}",
        "Recomputed": f"{count(tokens['recomputed'])} of {count(tokens['context'])} tokens",
        "Kept": f"{count(tokens['kept'])} of {count(tokens['context'])} tokens",
        "Loaded": f"{size(kv['heads'] + kv['loaded'])} of {size(kv['context_kv'])}",
    }


def _exact(figure: MetricFigure, sums: MetricSums, price: HourPrice | None) -> float | None:
    value = figure.of(sums)
    if figure.form != "money" or value is None:
        return value
    return None if price is None else price.of(value)


class Tiles:
    """The tiles of the overview."""

    def __init__(self, engine_thread: EngineThread, series: Series):
        self._engine_thread, self._series = engine_thread, series
        self._tiles: dict[str, Callable[[TileContent], None]] = {}
        self._element = ui.element("div").classes("tiles")

    def refresh(self, chosen: TimeRange, tenant: str | None) -> None:
        """Show the figures of a range of time, of a tenant or of all (None)."""
        metrics = self._engine_thread.metrics
        if chosen.whole:
            sums = metrics.sums if tenant is None else metrics.tenants.get(tenant, MetricSums())
        else:
            sums = self._series.between(*chosen.moments(), tenant=tenant).sums
        rate = self._series.last(RATE_SECONDS, tenant)
        found = figures(sums, rate, self._engine_thread.health())
        if not self._tiles:
            with self._element:
                self._tiles = {name: _tile(name) for name in found}
        for name, figure in found.items():
            self._tiles[name](figure)


def _tile(name: str) -> Callable[[TileContent], None]:
    with ui.element("section").classes("tile").props(f'aria-label="{name}"') as tile:
        Term(name).classes("name")
        value, note = ui.label().classes("value"), ui.label().classes("note")

    def show(figure: TileContent) -> None:
        value.set_text(figure.value)
        note.set_text(figure.note)
        if tile.props.get("data-exact") != repr(figure.exact):
            tile.props(f'data-exact="{figure.exact!r}"')

    return show
