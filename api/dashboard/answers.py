"""The latest answers, and one answer with the map of the blocks it was read from."""

from __future__ import annotations

from math import inf
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.events import GenericEventArguments

from ragkv.api.dashboard.answer_card import AnswerCard
from ragkv.api.dashboard.answer_text import OpenDocument
from ragkv.api.dashboard.buttons import quiet_button
from ragkv.api.dashboard.formatting import duration, percent
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.history import QUESTION_CHARS, to_answer_summary
from ragkv.errors import NotFound

LATEST = 12
"""Answers in the list."""
_COLUMNS: list[dict[str, Any]] = [
    {"name": "question", "label": "Question and answer", "field": "question", "align": "left"},
    {"name": "when", "label": "Answered", "field": "when", "align": "left"},
    {"name": "method", "label": "Method", "field": "method", "align": "left"},
    {"name": "ttft", "label": "First token", "field": "ttft"},
    {"name": "full", "label": "Full, estimated", "field": "full"},
    {"name": "hit", "label": "Cache hits", "field": "hit"},
    {"name": "recompute", "label": "Recomputed", "field": "recompute"},
    {"name": "sequence", "label": "Kept", "field": "sequence"},
]
# A button can be focused with the keyboard. Vue shows question and answer as text.
_QUESTION = """<q-td :props="props">
  <button type="button" class="link" @click="$parent.$emit('open', props.row.id)">{{ props.value }}</button>
  <div class="given">{{ props.row.answer }}</div>
</q-td>"""
# On a narrow page the time goes below the date.
_WHEN = """<q-td :props="props" class="moment">
  <span>{{ new Date(1000 * props.value).toLocaleDateString() }}</span>{{ " " }}
  <span>{{ new Date(1000 * props.value).toLocaleTimeString() }}</span>
</q-td>"""


class LatestAnswers:
    """A table of the latest answers. A click on a row opens its answer."""

    def __init__(self, engine_thread: EngineThread, tenant: Tenant, open_document: OpenDocument):
        self._engine_thread, self._tenant, self._open_document = engine_thread, tenant, open_document
        self._shown: list[float] = []
        with ui.element("section").classes("card").props('aria-label="Latest answers"'):
            self._table = ui.table(columns=_COLUMNS, rows=[], row_key="id", title="Latest answers")
            self._table.props('flat wrap-cells hide-pagination no-data-label="No questions yet."')
            self._table.classes("w-full").add_slot("body-cell-question", _QUESTION)
            self._table.add_slot("body-cell-when", _WHEN)
            self._table.on("open", self._open)
        self._dialog = ui.dialog().props("full-width")

    async def refresh(self) -> None:
        """Show the current state."""
        found = await to_thread.run_sync(self._engine_thread.catalog_service.answers, self._tenant.name, LATEST, inf)
        if [each.when for each in found] != self._shown:
            self._shown = [each.when for each in found]
            self._table.rows = [_row(each, to_answer_summary(each, self._tenant)) for each in found]

    async def _open(self, event: GenericEventArguments) -> None:
        self._dialog.clear()
        with self._dialog, ui.card().classes("viewer"):
            with ui.row().classes("line"):
                ui.label("Answer").classes("title").props("role=heading aria-level=2")
                quiet_button("Close", self._dialog.close, "close").props("dense")
            await show_answer(self._engine_thread, self._tenant, str(event.args), self._open_document)
        self._dialog.open()


async def show_answer(engine_thread: EngineThread, tenant: Tenant, id: str, open_document: OpenDocument) -> None:
    """Show an answer and its map in the current element, or a note if the answer is no longer kept."""
    try:
        recorded = await to_thread.run_sync(engine_thread.catalog_service.answer, tenant.name, id)
    except NotFound:
        ui.label("This answer is no longer kept.").classes("note")
        return
    card = AnswerCard(engine_thread, recorded.answer.question, open_document)
    await card.show_recorded(recorded, with_map=True)


def _row(recorded: RecordedAnswer, summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": summary["id"],
        "question": summary["question"],
        "answer": recorded.answer.answer[:QUESTION_CHARS],
        "when": summary["when"],
        "method": summary["method"],
        "ttft": duration(summary["ttft"] / 1000),
        "full": f"≈ {duration(summary['full_ms'] / 1000)}" if summary["full_ms"] else "",
        "hit": percent(summary["ratios"]["cache_hit"]),
        "recompute": percent(summary["ratios"]["recompute"]),
        "sequence": percent(summary["ratios"]["sequence"]),
    }
