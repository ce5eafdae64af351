"""The Documents tab: uploads, jobs, and the documents of a collection."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.events import GenericEventArguments

from api.dashboard.formatting import count, duration, size
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from ingest.jobs import IngestJob
from ragkv.errors import NotFound, RagkvError

PAGE = 50
"""Documents of one page."""
_BOX = """<q-checkbox v-model="props.selected" :aria-label="'Choose ' + {label}" />"""
JOBS = 8
"""Latest jobs that are shown."""
_COLUMNS: list[dict[str, Any]] = [
    {"name": "title", "label": "Document", "field": "title", "align": "left"},
    {"name": "id", "label": "Id", "field": "id", "align": "left"},
    {"name": "chunks", "label": "Chunks", "field": "chunks"},
    {"name": "tokens", "label": "Tokens", "field": "tokens"},
    {"name": "kv", "label": "KV", "field": "kv"},
]


class DocumentsPage:
    """Upload form, latest jobs, and a table of the documents of one collection."""

    def __init__(self, engine_thread: EngineThread, tenant: Tenant):
        self._engine_thread, self._tenant = engine_thread, tenant
        self._after = [""]
        self._jobs: dict[str, _JobRow] = {}
        self._shown, self._refreshing = "", False
        self._build_upload()
        with ui.element("section").classes("card").props('aria-label="Jobs"'):
            ui.label("Jobs").classes("title").props("role=heading aria-level=2")
            self._no_jobs = ui.label("No jobs yet.").classes("note")
            self._list = ui.column().classes("w-full")
        self._build_table()

    def _build_upload(self) -> None:
        with ui.element("section").classes("card").props('aria-label="Add documents"'):
            with ui.row().classes("line"):
                ui.label("Add documents").classes("title").props("role=heading aria-level=2")
                self._collection = ui.input("Collection", value="default", on_change=self._first_page)
                self._collection.props("dense outlined")
            self._files = _uploader(self._on_uploaded, self._on_refused)
            self._fault = ui.label().classes("fault").props("role=alert")

    def _build_table(self) -> None:
        with ui.element("section").classes("card").props('aria-label="Documents"'):
            self._table = ui.table(columns=_COLUMNS, rows=[], row_key="id", selection="multiple", title="Documents")
            self._table.props("flat wrap-cells hide-pagination").classes("w-full")
            self._table.add_slot("header-selection", _BOX.format(label="'all of them'"))
            self._table.add_slot("body-selection", _BOX.format(label="props.row.title"))
            with ui.row().classes("line"):
                ui.button("Delete", icon="delete", on_click=self._delete).props("flat no-caps")
                with ui.row():
                    self._back = ui.button("Back", on_click=self._previous_page).props("flat no-caps")
                    self._more = ui.button("More", on_click=self._next_page).props("flat no-caps")

    async def refresh(self) -> None:
        """Show the current state, unless a refresh is running."""
        if not self._refreshing:
            self._refreshing = True
            try:
                jobs = await to_thread.run_sync(self._engine_thread.jobs.recent, JOBS, self._tenant.inside(""))
                self._show_jobs(jobs)
                await self._show_documents(jobs)
            finally:
                self._refreshing = False

    @property
    def _inside(self) -> str:
        return self._tenant.inside(self._collection.value.strip() or "default")

    def _show_jobs(self, jobs: list[IngestJob]) -> None:
        self._no_jobs.set_visibility(not jobs)
        if [job.id for job in jobs] != list(self._jobs):
            self._list.clear()
            with self._list:
                self._jobs = {job.id: _JobRow(job, self._tenant, self._cancel) for job in jobs}
        for job in jobs:
            self._jobs[job.id].show(job)

    async def _show_documents(self, jobs: list[IngestJob]) -> None:
        state = repr((self._inside, self._after, [(job.id, job.counts) for job in jobs]))
        if state == self._shown:
            return
        self._shown, service = state, self._engine_thread.catalog_service
        after = self._after[-1]
        found = await to_thread.run_sync(service.page, self._inside, (after, after) if after else None, PAGE + 1)
        self._table.rows = [
            {
                "id": info.id,
                "title": info.title or info.id,
                "chunks": info.chunks,
                "tokens": info.tokens,
                "kv": size(info.tokens * service.token_bytes),
            }
            for info in found[:PAGE]
        ]
        self._more.set_enabled(len(found) > PAGE)
        self._back.set_enabled(len(self._after) > 1)

    async def _first_page(self) -> None:
        self._after[:] = [""]
        self._files.props[":form-fields"] = json.dumps([{"name": "collection", "value": self._collection.value}])
        await self.refresh()

    async def _next_page(self) -> None:
        if self._table.rows:
            self._after.append(self._table.rows[-1]["id"])
            await self.refresh()

    async def _previous_page(self) -> None:
        if len(self._after) > 1:
            self._after.pop()
            await self.refresh()

    async def _delete(self) -> None:
        chosen = [row["id"] for row in self._table.selected]
        if not chosen or not await _confirm(f"Delete {count(len(chosen))} documents, their text and their KV?"):
            return
        for document_id in chosen:
            with suppress(NotFound):  # it was deleted meanwhile
                await to_thread.run_sync(self._engine_thread.catalog_service.remove, self._inside, document_id)
        self._engine_thread.wake()
        self._table.selected.clear()
        self._shown = ""
        await self.refresh()

    async def _cancel(self, job_id: str) -> None:
        try:
            await to_thread.run_sync(self._engine_thread.jobs.cancel, job_id)
        except RagkvError as error:
            self._fault.set_text(str(error))
        await self.refresh()

    async def _on_uploaded(self) -> None:
        self._fault.set_text("")
        self._files.run_method("reset")
        await self.refresh()

    def _on_refused(self, event: GenericEventArguments) -> None:
        body = event.args if isinstance(event.args, str) else ""
        try:
            detail = json.loads(body)["detail"]
        except (ValueError, KeyError, TypeError):
            detail = "the upload failed; check that the service is running and that the files are not too large"
        self._fault.set_text(str(detail))


class _JobRow:
    """One job with its progress."""

    def __init__(self, job: IngestJob, tenant: Tenant, cancel: Callable[[str], Awaitable[None]]):
        self._tenant = tenant
        with ui.row().classes("line"):
            ui.label(f"{tenant.outside(job.collection)} · {job.counts.total} documents")
            self._status = ui.label().classes("note")
            self._stop = ui.button("Cancel", on_click=lambda: cancel(job.id)).props("flat dense no-caps")
        self._bar = ui.linear_progress(0, show_value=False).props(f'rounded aria-label="Progress of job {job.id}"')

    def show(self, job: IngestJob) -> None:
        """Show the current state of the job."""
        counts = job.counts
        share = counts.done / counts.total
        if counts.done < counts.total and job.total and job.stage:
            share += job.done / job.total / counts.total
        faults = f" · {counts.failed} failed: {self._tenant.told(job.last_error.message)}" if job.last_error else ""
        left = f" · {duration(job.eta_seconds)} left" if job.finished is None and job.eta_seconds else ""
        self._status.set_text(f"{job.status} · {counts.done} of {counts.total} done{left}{faults}")
        self._bar.set_value(round(share, 3))
        self._stop.set_visibility(job.finished is None)


def _uploader(
    on_uploaded: Callable[[], Awaitable[None]], on_refused: Callable[[GenericEventArguments], None]
) -> ui.element:
    """Build the upload element. It sends files to the HTTP API like any client, so the same limits and errors apply."""
    files = ui.element("q-uploader").classes("w-full")
    files.props("flat bordered multiple batch auto-upload field-name=files url=/v1/documents")
    files.props('label="Text, Markdown, HTML, PDF, Word, CSV or JSON lines"')
    files.on("uploaded", on_uploaded, args=[])
    files.on("failed", on_refused, js_handler="(info) => emit(info.xhr.responseText)")
    return files


async def _confirm(question: str) -> bool:
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Delete", on_click=lambda: dialog.submit(True)).props("color=negative no-caps")
            ui.button("Keep", on_click=lambda: dialog.submit(False)).props("flat no-caps")
    answer = await dialog
    dialog.delete()
    return bool(answer)
