"""The Overview tab: figures and charts of a range of time, the latest answers, and what each tenant used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from nicegui import ui

from ragkv.api.dashboard.answer_text import OpenDocument
from ragkv.api.dashboard.answers import LatestAnswers
from ragkv.api.dashboard.charts import Charts
from ragkv.api.dashboard.formatting import count, duration, percent, size
from ragkv.api.dashboard.ranges import RangeChoice, TimeRange
from ragkv.api.dashboard.series import Series
from ragkv.api.dashboard.tiles import Tiles
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.rate_limits import RateLimiter, TenantUsage
from ragkv.api.runtime.tenants import Tenant
from ragkv.metrics.sums import MetricSums
from ragkv.types import HourPrice

_ALL = ""
"""The choice of all tenants."""
UNMEASURED = "the answers: not measured on your documents (ragkv calibrate --documents does it)"
_COLUMNS: list[dict[str, Any]] = [
    {"name": "tenant", "label": "Tenant", "field": "tenant", "align": "left"},
    {"name": "answers", "label": "Answers", "field": "answers"},
    {"name": "unanswered", "label": "Unanswered", "field": "unanswered"},
    {"name": "ttft", "label": "First token", "field": "ttft"},
    {"name": "hits", "label": "Cache hits", "field": "hits"},
    {"name": "requests", "label": "Requests", "field": "requests"},
    {"name": "tokens", "label": "Tokens", "field": "tokens"},
    {"name": "bytes", "label": "Documents sent", "field": "bytes"},
    {"name": "refused", "label": "Over a limit", "field": "refused"},
]


class Overview:
    """The overview. A tenant sees its own figures, an operator those of each tenant and of all."""

    def __init__(self, app: FastAPI, user: Tenant | None, caller: Caller, open_document: OpenDocument):
        self._engine_thread: EngineThread = app.state.engine_thread
        self._limiter: RateLimiter = app.state.limiter
        series: Series = app.state.series
        tenant = user or Tenant()
        self._range = TimeRange()
        self._operator = user is not None and user.name in app.state.operators
        self._tenant: str | None = None if user is None or self._operator else user.name
        with ui.element("div").classes("line flex"):
            ui.label("What the answers saved").classes("title").props("role=heading aria-level=2")
            with ui.element("div").classes("choices"):
                if self._operator:
                    names = {_ALL: "all tenants", **{name: name for name in sorted(app.state.authenticator.tenants)}}
                    whose = ui.select(names, value=_ALL, label="Tenant", on_change=self._choose_tenant)
                    whose.props("dense outlined options-dense").classes("choice")
                elif user is not None:
                    ui.label(f"tenant {user.name}").classes("note")
                RangeChoice(self._choose_range)
        with ui.element("div").classes("line flex"):
            ui.label(f"Quality of {self._engine_thread.profile.quality or UNMEASURED}").classes("note")
            if caller.writes and (user is None or self._operator):
                self._build_price()
        self._tiles, self._charts = Tiles(self._engine_thread, series), Charts(series)
        self._usage = self._build_usage() if self._operator else None
        self._latest = LatestAnswers(self._engine_thread, tenant, open_document)

    def _build_price(self) -> None:
        """Add the field for the price of an hour, which every figure of money is computed with."""
        price = ui.input("Price of an hour", placeholder="2.50 USD").props("dense outlined maxlength=20")
        price.value = self._engine_thread.health().get("price", "")

        async def record() -> None:
            told = HourPrice.read(price.value or "")
            if told is None and (price.value or "").strip():
                ui.notify("Write an amount and, if you like, a currency: 2.50 USD")
                return
            await to_thread.run_sync(self._engine_thread.catalog_service.record_hour_price, told)

        price.on("change", record).on("keydown.enter", record)

    def _build_usage(self) -> ui.table:
        with ui.element("section").classes("card").props('aria-label="Tenants"'):
            table = ui.table(columns=_COLUMNS, rows=[], row_key="tenant", title="Tenants, since the start")
            return table.props("flat dense hide-pagination").classes("w-full")

    async def refresh(self) -> None:
        """Show the current state."""
        self._tiles.refresh(self._range, self._tenant)
        self._charts.refresh(self._range, self._tenant)
        if self._usage is not None:
            rows = usage_rows(self._engine_thread.metrics.tenants, self._limiter.usage())
            if rows != self._usage.rows:
                self._usage.rows = rows
        await self._latest.refresh()

    async def _choose_tenant(self, event: Any) -> None:
        self._tenant = event.value or None
        await self.refresh()

    async def _choose_range(self, chosen: TimeRange) -> None:
        self._range = chosen
        await self.refresh()


def usage_rows(sums: Mapping[str, MetricSums], usage: Mapping[str, TenantUsage]) -> list[dict[str, str]]:
    """Return a row for each tenant that has used the service.

    Args:
        sums: Sums over the answers of each tenant.
        usage: Requests, tokens and bytes of each tenant.
    """
    rows = []
    for name in sorted(filter(None, sums.keys() | usage.keys())):
        own, used = sums.get(name, MetricSums()), usage.get(name, TenantUsage())
        rows.append(
            {
                "tenant": name,
                "answers": count(own.answered),
                "unanswered": count(sum(own.ended.values())),
                "ttft": duration(own.seconds["ttft"].quantile(0.5)),
                "hits": percent(own.cache_hit),
                "requests": count(used.used["requests"]),
                "tokens": count(used.used["tokens"]),
                "bytes": size(used.used["bytes"]),
                "refused": count(sum(used.refused.values())),
            }
        )
    return rows
