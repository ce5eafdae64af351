"""The Documents tab: uploads, jobs, and the documents of a collection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from anyio import to_thread
from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from ragkv.api.dashboard.buttons import confirm_deletion, quiet_button
from ragkv.api.dashboard.document_rows import (
    Pending,
    Tag,
    common_tags,
    describe_tag,
    document_row,
    find_pending,
    folders_of,
    matches,
    pending_row,
)
from ragkv.api.dashboard.formatting import count, quantity, size
from ragkv.api.dashboard.jobs import JobList
from ragkv.api.middleware.body_limit import UPLOAD_DOCUMENTS
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.ingest_queue import enqueue
from ragkv.api.runtime.removal import remove_document_of
from ragkv.catalog import DocumentInfo, DocumentOrder, SortField
from ragkv.errors import NotFound, RagkvError
from ragkv.ingest.folders import SUFFIXES
from ragkv.ingest.jobs import IngestJob

PAGE = 50
"""Documents of one page."""
SCANNED = 2000
"""Documents whose folders and tags are offered."""
STATES = {"": "all", "ready": "ready", "waiting": "waiting", "failed": "failed"}


FORMAT_NAMES = {
    ".txt": "text",
    ".md": "Markdown",
    ".html": "HTML",
    ".htm": "HTML",
    ".xhtml": "HTML",
    ".pdf": "PDF",
    ".docx": "Word",
    ".pptx": "PowerPoint",
    ".xlsx": "Excel",
    ".epub": "EPUB",
    ".eml": "e-mail",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".jsonl": "JSON lines",
}
"""What users call the formats, by suffix."""


def named_formats() -> str:
    """Name all formats that are read: Text, Markdown, HTML, …"""
    names = list(dict.fromkeys(FORMAT_NAMES.get(suffix, suffix) for suffix in sorted(SUFFIXES, key=_usual)))
    return f"{names[0].capitalize()}, {', '.join(names[1:-1])} or {names[-1]}"


def _usual(suffix: str) -> int:
    return list(FORMAT_NAMES).index(suffix) if suffix in FORMAT_NAMES else len(FORMAT_NAMES)


class DropZone(Element, component="dropzone.js"):
    """Takes files and sends them to the HTTP API like any client, so the same limits and errors apply."""

    def __init__(self, max_document_bytes: int):
        super().__init__()
        together = UPLOAD_DOCUMENTS * max_document_bytes
        facts = {"collection": "default", "limit": max_document_bytes, "together": together, "formats": named_formats()}
        self._props.update(facts)

    def show(self, **props: Any) -> None:
        """Change some properties."""
        self._props.update(props)


class DocumentTable(Element, component="documents.js"):
    """The table, drawn by documents.js, which names the properties and events."""

    def show(self, **props: Any) -> None:
        """Change some properties."""
        self._props.update(props)


class DocumentsPage:
    """Upload form, latest jobs, and a table of the documents of one collection."""

    def __init__(self, engine_thread: EngineThread, caller: Caller, open_document: Callable[[str, str], Any]):
        self._engine_thread, self._caller, self._tenant = engine_thread, caller, caller.tenant
        self._open_document = open_document
        self._order = DocumentOrder("title")
        self._tag: Tag | None = None
        self._tags: dict[int, Tag] = {}
        self._cursors: list[tuple[str | float, str] | None] = [None]
        self._next: tuple[str | float, str] | None = None
        self._shown, self._refreshing = "", False
        with ui.element("section").classes("card").props('aria-label="Add documents"'):
            with ui.row().classes("line"):
                ui.label("Add documents").classes("title").props("role=heading aria-level=2")
                self._collection = ui.select(
                    ["default"],
                    value="default",
                    label="Collection",
                    new_value_mode="add-unique",
                    on_change=self._change_collection,
                ).props('dense outlined options-dense hint="Choose one, or type a new name." hide-hint')
                self._collection.classes("choice")
            self._drop_zone = DropZone(engine_thread.catalog_service.max_document_bytes)
            self._drop_zone.on("sent", self.refresh, args=[])
            self._drop_zone.set_visibility(caller.writes)
        self._jobs = JobList(engine_thread, caller)
        self._build_table()

    def _build_table(self) -> None:
        with ui.element("section").classes("card").props('aria-label="Documents"'):
            with ui.row().classes("line"):
                with ui.element("div"):
                    ui.label("Documents").classes("title").props("role=heading aria-level=2")
                    self._totals = ui.label().classes("note")
                with ui.element("div").classes("choices"):
                    self._words = ui.input("Search ids and titles", on_change=self._change_order)
                    self._words.props("dense outlined clearable debounce=250 type=search")
                    self._state = ui.select(STATES, value="", label="Status", on_change=self._change_order)
                    self._state.props("dense outlined options-dense").classes("choice")
                    self._folder = ui.select({"": "all"}, value="", label="Folder", on_change=self._change_order)
                    self._tagged = ui.select({-1: "all"}, value=-1, label="Tag", on_change=self._change_tag)
                    for choice in (self._folder, self._tagged):
                        choice.props("dense outlined options-dense").classes("choice").set_visibility(False)
            self._table = DocumentTable()
            self._table.show(editable=self._caller.writes)
            self._table.on("sort", self._sort)
            self._table.on("open", lambda event: self._open_document(self._inside, str(event.args)))
            self._table.on("remove", self._remove)
            self._table.on("again", self._ingest_again)
            with ui.row().classes("line pages"):
                self._range = ui.label().classes("note")
                with ui.row():
                    self._back = quiet_button("Back", self._previous_page)
                    self._more = quiet_button("More", self._next_page)

    async def refresh(self) -> None:
        """Show the current state, unless a refresh is running."""
        if not self._refreshing:
            self._refreshing = True
            try:
                await self._show_documents(await self._jobs.refresh())
            finally:
                self._refreshing = False

    @property
    def _inside(self) -> str:
        return self._tenant.inside(self._collection.value or "default")

    async def _show_documents(self, jobs: list[IngestJob]) -> None:
        counts = [(job.id, job.counts) for job in jobs]
        state = repr((self._inside, self._cursors, self._order, self._tag, self._state.value, counts))
        if state == self._shown:
            return
        self._shown, service, chosen = state, self._engine_thread.catalog_service, self._state.value
        await self._show_totals()
        await self._offer_filters()
        found: list[DocumentInfo] = []
        if chosen in ("", "ready"):
            conditions = {self._tag[0]: self._tag[1]} if self._tag else None
            page = partial(service.page, self._inside, self._cursors[-1], PAGE + 1, conditions, self._order)
            found = await to_thread.run_sync(page)
        pending: list[Pending] = []
        if chosen != "ready" and len(self._cursors) == 1:
            own = [job for job in jobs if job.collection == self._inside]
            pending = await to_thread.run_sync(partial(find_pending, own, self._engine_thread.jobs.get))
        fits = [each for each in pending if chosen in ("", each.state) and matches(each.id, self._order.words)]
        rows = [pending_row(each, self._tenant) for each in fits if each.id.startswith(self._order.folder)]
        rows += await to_thread.run_sync(self._rows, found[:PAGE])
        self._next = self._order.place(found[PAGE - 1]) if len(found) > PAGE else None
        filtered = chosen or self._order.words or self._order.folder or self._tag
        self._table.show(
            rows=rows,
            sort=self._order.sort,
            descending=self._order.descending,
            empty="No document matches." if filtered else "No documents yet. Add some above.",
        )
        first = (len(self._cursors) - 1) * PAGE
        self._range.set_text(f"{first + 1}–{first + len(rows)}" if rows else "")
        self._more.set_visibility(self._next is not None)
        self._back.set_visibility(len(self._cursors) > 1)

    def _rows(self, infos: list[DocumentInfo]) -> list[dict[str, Any]]:
        service = self._engine_thread.catalog_service
        sizes = service.kv.documents(infos)
        return [
            document_row(info, size, service.kv.question_saves(info)) for info, size in zip(infos, sizes, strict=True)
        ]

    async def _offer_filters(self) -> None:
        """Offer the folders and tags of the collection, as far as its first documents have them."""
        page = partial(self._engine_thread.catalog_service.page, self._inside, None, SCANNED)
        infos = await to_thread.run_sync(page)
        folders = {"": "all", **{each: f"{each} ({number})" for each, number in folders_of(infos).items()}}
        self._tags = dict(enumerate(common_tags(infos)))
        tags = {-1: "all", **{number: describe_tag(tag) for number, tag in self._tags.items()}}
        for choice, options in ((self._folder, folders), (self._tagged, tags)):
            if options != choice.options:
                choice.set_options(options, value=choice.value if choice.value in options else next(iter(options)))
            choice.set_visibility(len(options) > 1)

    async def _show_totals(self) -> None:
        """Show how much the collection holds, and offer all collections."""
        service = self._engine_thread.catalog_service
        collections = await to_thread.run_sync(service.collections, self._tenant.inside(""))
        names = [self._tenant.outside(each.name) for each in collections]
        options = list(dict.fromkeys([*names, "default", self._collection.value or "default"]))
        if options != self._collection.options:
            self._collection.set_options(options)
        own = next((each for each in collections if each.name == self._inside), None)
        kv = service.kv.collection(own) if own else None
        self._totals.set_text(
            f"{quantity(own.documents, 'document')} · {quantity(own.chunks, 'chunk')}"
            f" · {quantity(own.tokens, 'token')} · KV {size(kv.computed)} as computed, ≈ {size(kv.stored)} in the store"
            + (f" · files {size(own.file_bytes)}" if own.file_bytes else "")
            if own and kv
            else "Nothing is stored in this collection."
        )

    async def _change_collection(self) -> None:
        self._drop_zone.show(collection=self._collection.value or "default")
        await self._first_page()

    async def _change_order(self) -> None:
        words, folder = self._words.value or "", self._folder.value or ""
        self._order = DocumentOrder(self._order.sort, self._order.descending, words, folder)
        await self._first_page()

    async def _change_tag(self) -> None:
        self._tag = self._tags.get(self._tagged.value)
        await self._first_page()

    async def _sort(self, event: GenericEventArguments) -> None:
        field = cast("SortField", str(event.args))
        descending = field == self._order.sort and not self._order.descending
        self._order = replace(self._order, sort=field, descending=descending)
        await self._first_page()

    async def _first_page(self) -> None:
        self._cursors[:] = [None]
        await self.refresh()

    async def _next_page(self) -> None:
        if self._next is not None:
            self._cursors.append(self._next)
            await self.refresh()

    async def _previous_page(self) -> None:
        if len(self._cursors) > 1:
            self._cursors.pop()
            await self.refresh()

    async def _ingest_again(self, event: GenericEventArguments) -> None:
        """Split, embed and encode documents again. What is asked meanwhile is answered from what is stored."""
        collection, ids = self._inside, [str(id) for id in event.args]
        try:
            self._caller.require_writer()
            found = await to_thread.run_sync(self._engine_thread.catalog_service.read_again, collection, ids)
            if found:
                await enqueue(found, collection, self._engine_thread, self._caller)
        except RagkvError as error:
            ui.notify(self._tenant.told(error.public))
        await self.refresh()

    async def _remove(self, event: GenericEventArguments) -> None:
        chosen, collection = [str(id) for id in event.args], self._collection.value or "default"
        these = "this document, its" if len(chosen) == 1 else f"these {count(len(chosen))} documents, their"
        if not chosen or not await confirm_deletion(
            f"Delete {these} text and KV, and the answers that were read from them?"
        ):
            return
        for document_id in chosen:
            with suppress(NotFound):  # it was deleted meanwhile
                await to_thread.run_sync(remove_document_of, self._caller, collection, document_id, self._engine_thread)
        self._shown = ""
        await self.refresh()
