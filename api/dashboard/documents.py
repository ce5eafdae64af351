"""Papers: the documents of a collection, files on their way in, and jobs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.events import GenericEventArguments

from api.dashboard.formatting import count, size, span
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from ingest.jobs import IngestJob
from ragkv.errors import NotFound, RagkvError

PAGE = 50
"""Documents shown at a time."""
_BOX = """<q-checkbox v-model="props.selected" :aria-label="'Choose ' + {whom}" />"""
JOBS = 8
"""Jobs shown, the latest."""
_COLUMNS: list[dict[str, Any]] = [
    {"name": "title", "label": "Document", "field": "title", "align": "left"},
    {"name": "id", "label": "Id", "field": "id", "align": "left"},
    {"name": "chunks", "label": "Chunks", "field": "chunks"},
    {"name": "tokens", "label": "Tokens", "field": "tokens"},
    {"name": "kv", "label": "KV", "field": "kv"},
]


class DocumentsPage:
    """Draws itself where it is made, and again with `look`."""

    def __init__(self, worker: EngineThread, tenant: Tenant):
        self._worker, self._tenant = worker, tenant
        self._after = [""]
        self._jobs: dict[str, _Row] = {}
        self._seen, self._looking = "", False
        with ui.element("section").classes("card").props('aria-label="Add documents"'):
            with ui.row().classes("line"):
                ui.label("Add documents").classes("title").props("role=heading aria-level=2")
                self._collection = ui.input("Collection", value="default", on_change=self._turn_to_first).props(
                    "dense outlined"
                )
            self._files = _uploader(self._sent, self._refused)
            self._told = ui.label().classes("fault").props("role=alert")
        with ui.element("section").classes("card").props('aria-label="Jobs"'):
            ui.label("Jobs").classes("title").props("role=heading aria-level=2")
            self._none = ui.label("Nothing was sent yet.").classes("note")
            self._list = ui.column().classes("w-full")
        with ui.element("section").classes("card").props('aria-label="Documents"'):
            self._table = ui.table(columns=_COLUMNS, rows=[], row_key="id", selection="multiple", title="Documents")
            self._table.props("flat wrap-cells hide-pagination").classes("w-full")
            self._table.add_slot("header-selection", _BOX.format(whom="'all of them'"))
            self._table.add_slot("body-selection", _BOX.format(whom="props.row.title"))
            with ui.row().classes("line"):
                ui.button("Delete", icon="delete", on_click=self._delete).props("flat no-caps")
                with ui.row():
                    self._back = ui.button("Back", on_click=self._turn_back).props("flat no-caps")
                    self._more = ui.button("More", on_click=self._turn_on).props("flat no-caps")

    async def look(self) -> None:
        """Show what is so now."""
        if not self._looking:
            self._looking = True
            try:
                jobs = await to_thread.run_sync(self._worker.jobs.recent, JOBS, self._tenant.inside(""))
                self._show_jobs(jobs)
                await self._show_documents(jobs)
            finally:
                self._looking = False

    @property
    def _inside(self) -> str:
        return self._tenant.inside(self._collection.value.strip() or "default")

    def _show_jobs(self, jobs: list[IngestJob]) -> None:
        self._none.set_visibility(not jobs)
        if [job.id for job in jobs] != list(self._jobs):
            self._list.clear()
            with self._list:
                self._jobs = {job.id: _Row(job, self._tenant, self._cancel) for job in jobs}
        for job in jobs:
            self._jobs[job.id].show(job)

    async def _show_documents(self, jobs: list[IngestJob]) -> None:
        now = repr((self._inside, self._after, [(job.id, job.counts) for job in jobs]))
        if now == self._seen:
            return
        self._seen, holdings = now, self._worker.catalog_service
        found = await to_thread.run_sync(holdings.page, self._inside, self._after[-1], PAGE + 1, None)
        self._table.rows = [
            {
                "id": info.id,
                "title": info.title or info.id,
                "chunks": info.chunks,
                "tokens": info.tokens,
                "kv": size(info.tokens * holdings.token_bytes),
            }
            for info in found[:PAGE]
        ]
        self._more.set_enabled(len(found) > PAGE)
        self._back.set_enabled(len(self._after) > 1)

    async def _turn_to_first(self) -> None:
        self._after[:] = [""]
        self._files.props[":form-fields"] = json.dumps([{"name": "collection", "value": self._collection.value}])
        await self.look()

    async def _turn_on(self) -> None:
        if self._table.rows:
            self._after.append(self._table.rows[-1]["id"])
            await self.look()

    async def _turn_back(self) -> None:
        if len(self._after) > 1:
            self._after.pop()
            await self.look()

    async def _delete(self) -> None:
        chosen = [row["id"] for row in self._table.selected]
        if not chosen or not await _sure(f"Delete {count(len(chosen))} documents, their text and their KV?"):
            return
        for document_id in chosen:
            with suppress(NotFound):  # somebody else was quicker
                await to_thread.run_sync(self._worker.catalog_service.remove, self._inside, document_id)
        self._worker.wake()
        self._table.selected.clear()
        self._seen = ""
        await self.look()

    async def _cancel(self, job_id: str) -> None:
        try:
            await to_thread.run_sync(self._worker.jobs.cancel, job_id)
        except RagkvError as error:
            self._told.set_text(str(error))
        await self.look()

    async def _sent(self) -> None:
        self._told.set_text("")
        self._files.run_method("reset")
        await self.look()

    def _refused(self, event: GenericEventArguments) -> None:
        said = event.args if isinstance(event.args, str) else ""
        try:
            detail = json.loads(said)["detail"]
        except (ValueError, KeyError, TypeError):
            detail = "the files were not taken; is the service there, and are they small enough?"
        self._told.set_text(str(detail))


class _Row:
    """A job, as a line with its progress."""

    def __init__(self, job: IngestJob, tenant: Tenant, cancel: Callable[[str], Awaitable[None]]):
        self._tenant = tenant
        with ui.row().classes("line"):
            ui.label(f"{tenant.outside(job.collection)} · {job.counts.total} documents")
            self._told = ui.label().classes("note")
            self._stop = ui.button("Cancel", on_click=lambda: cancel(job.id)).props("flat dense no-caps")
        self._bar = ui.linear_progress(0, show_value=False).props(f'rounded aria-label="Progress of job {job.id}"')

    def show(self, job: IngestJob) -> None:
        """As it is now."""
        counts = job.counts
        share = counts.done / counts.total
        if counts.done < counts.total and job.total and job.stage:
            share += job.done / job.total / counts.total
        faults = f" · {counts.failed} failed: {self._tenant.told(job.last_error.message)}" if job.last_error else ""
        left = f" · {span(job.eta_seconds)} left" if job.finished is None and job.eta_seconds else ""
        self._told.set_text(f"{job.status} · {counts.done} of {counts.total} done{left}{faults}")
        self._bar.set_value(round(share, 3))
        self._stop.set_visibility(job.finished is None)


def _uploader(sent: Callable[[], Awaitable[None]], refused: Callable[[GenericEventArguments], None]) -> ui.element:
    """Sends files to the service's own API, as any other client: with its limits, and its words where it refuses."""
    files = ui.element("q-uploader").classes("w-full")
    files.props("flat bordered multiple batch auto-upload field-name=files url=/v1/documents")
    files.props('label="Text, Markdown, HTML, PDF, Word, CSV or JSON lines"')
    files.on("uploaded", sent, args=[])
    files.on("failed", refused, js_handler="(info) => emit(info.xhr.responseText)")
    return files


async def _sure(question: str) -> bool:
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Delete", on_click=lambda: dialog.submit(True)).props("color=negative no-caps")
            ui.button("Keep", on_click=lambda: dialog.submit(False)).props("flat no-caps")
    answer = await dialog
    dialog.delete()
    return bool(answer)
