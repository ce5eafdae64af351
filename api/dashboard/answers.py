"""Answered: the latest answers, and one of them with the map of what was read for it."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from api.dashboard.formatting import percent, span
from api.runtime.answer_history import RecordedAnswer
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from api.schemas.history import brief, drawn
from ragkv.errors import NotFound
from ragkv.report import Report

LATEST = 12
"""Answers that are listed."""
_COLUMNS: list[dict[str, Any]] = [
    {"name": "question", "label": "Question", "field": "question", "align": "left"},
    {"name": "method", "label": "Method", "field": "method", "align": "left"},
    {"name": "ttft", "label": "First token", "field": "ttft"},
    {"name": "full", "label": "Full, estimated", "field": "full"},
    {"name": "hit", "label": "Cache hits", "field": "hit"},
    {"name": "recompute", "label": "Recomputed", "field": "recompute"},
    {"name": "sequence", "label": "Kept", "field": "sequence"},
]
# A button, so that keys reach it, too; Vue shows the question as text.
_QUESTION = """<q-td :props="props">
  <button type="button" class="link" @click="$parent.$emit('open', props.row.id)">{{ props.value }}</button>
</q-td>"""


class KVMapView(Element, component="kvmap.js"):
    """map: as `GET /v1/answers/{id}/map` gives it."""

    def __init__(self, map: dict[str, Any]):
        super().__init__()
        self._props["map"] = map


class LatestAnswers:
    """Draws itself where it is made, and again with `look`. A row opens its answer."""

    def __init__(self, worker: EngineThread, tenant: Tenant):
        self._worker, self._tenant = worker, tenant
        self._seen: list[float] = []
        with ui.element("section").classes("card").props('aria-label="Latest answers"'):
            self._table = ui.table(columns=_COLUMNS, rows=[], row_key="id", title="Latest answers")
            self._table.props('flat wrap-cells hide-pagination no-data-label="Nothing was asked yet."')
            self._table.classes("w-full").add_slot("body-cell-question", _QUESTION)
            self._table.on("open", self._open)
        self._dialog = ui.dialog().props("full-width")

    async def look(self) -> None:
        """Show what is so now."""
        found = await to_thread.run_sync(self._worker.catalog_service.answers, self._tenant.name, LATEST, inf)
        if [each.when for each in found] != self._seen:
            self._seen = [each.when for each in found]
            self._table.rows = [_row(brief(each, self._tenant)) for each in found]

    async def _open(self, event: GenericEventArguments) -> None:
        self._dialog.clear()
        with self._dialog, ui.card().classes("w-full"):
            await show(self._worker, self._tenant, str(event.args))
        self._dialog.open()


async def show(worker: EngineThread, tenant: Tenant, id: str) -> None:
    """Draw an answer and its map here, or say that it is not remembered."""
    try:
        answered = await to_thread.run_sync(worker.catalog_service.answer, tenant.name, id)
    except NotFound:
        ui.label("This answer is not remembered any more.").classes("note")
        return
    ui.label(answered.answer.question).classes("title").props("role=heading aria-level=2")
    ui.label(answered.answer.answer).classes("answer")
    ui.label(said(answered.answer.report, answered.full_ms)).classes("note")
    await draw(worker, answered)


async def draw(worker: EngineThread, answered: RecordedAnswer) -> None:
    """Draw the map of an answer here."""
    texts = await to_thread.run_sync(partial(worker.catalog_service.texts, answered))
    KVMapView(drawn(answered, texts))


def said(report: Report, full_ms: float = 0.0) -> str:
    """The figures of an answer in a line. full_ms: its estimate of full recompute, 0: none."""
    full = f" (full recompute, estimated: {span(full_ms / 1000)})" if full_ms else ""
    ratios = report.ratios
    return (
        f"{report.method} · first token after {span(report.timings_ms.ttft / 1000)}{full}"
        f" · cache hits {percent(ratios.cache_hit)} · kept {percent(ratios.sequence)}"
        f" · recomputed {percent(ratios.recompute)} · loaded {percent(ratios.load)}"
    )


def _row(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": told["id"],
        "question": told["question"],
        "method": told["method"],
        "ttft": span(told["ttft"] / 1000),
        "full": f"≈ {span(told['full_ms'] / 1000)}" if told["full_ms"] else "",
        "hit": percent(told["ratios"]["cache_hit"]),
        "recompute": percent(told["ratios"]["recompute"]),
        "sequence": percent(told["ratios"]["sequence"]),
    }
