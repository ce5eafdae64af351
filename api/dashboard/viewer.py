"""The viewer: a document's text, pages, chunks, metadata and version, and the questions that were answered from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.element import Element
from nicegui.events import ValueChangeEventArguments

from ragkv.api.dashboard.answer_text import Place, place_of
from ragkv.api.dashboard.buttons import quiet_button
from ragkv.api.dashboard.formatting import NONE, count, duration, size
from ragkv.api.dashboard.passage_form import form_of
from ragkv.api.dashboard.pdf_page import PageView
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.kv_estimates import KVSizes
from ragkv.api.runtime.tenants import Tenant
from ragkv.catalog import DocumentInfo
from ragkv.errors import NotFound
from ragkv.types import Chunk

PART = 50_000
"""Characters that the viewer shows at a time."""
FIRST = 1_000_000
"""Most characters that it shows at once to reach a place."""
CHUNKS = 20
"""Chunks that the viewer shows at a time."""
_SHOW_MARK = "() => document.querySelector('.viewed mark')?.scrollIntoView({block: 'center'})"
TABS = ("Text", "Page", "Chunks", "Metadata", "Version", "Questions")


class Moment(Element, component="moment.js"):
    """A moment in the time zone of the browser. when: Unix seconds."""

    def __init__(self, when: float):
        super().__init__()
        self._props["when"] = when


class MarkedText(Element, component="text.js"):
    """Text of a document, drawn by text.js. words: the marked part between the others."""

    def __init__(self, before: str, words: str = "", after: str = ""):
        super().__init__()
        self._props.update({"before": before, "words": words, "after": after})


class DocumentViewer:
    """A dialog that shows one document at a time."""

    def __init__(self, engine_thread: EngineThread, tenant: Tenant, open_answer: Callable[[str], Any]):
        self._engine_thread, self._tenant, self._open_answer = engine_thread, tenant, open_answer
        self._dialog = ui.dialog().props("full-width full-height")
        # Not before the dialog is open: what is scrolled while it opens is scrolled back.
        self._dialog.on("show", js_handler=_SHOW_MARK)
        self._collection = self._id = ""

    async def open(self, collection: str, id: str, place: Place | None = None) -> None:
        """Show a document.

        Args:
            collection: Its collection, named as in the catalogue.
            id: Its id.
            place: Words to mark and to scroll to, unless the document has changed and they no longer stand there.
        """
        service = self._engine_thread.catalog_service
        self._collection, self._id = collection, id
        try:
            info, text = await to_thread.run_sync(service.whole, collection, id)
        except NotFound:
            ui.notify("This document is no longer stored.")
            return
        (sizes,) = await to_thread.run_sync(service.kv.documents, [info])
        used = await to_thread.run_sync(partial(answers_from, self._engine_thread, self._tenant, collection, id))
        self._dialog.clear()
        with self._dialog, ui.card().classes("viewer").props('role=document aria-label="Document"'):
            with ui.row().classes("line"):
                ui.label(info.title or id).classes("title").props("role=heading aria-level=2")
                quiet_button("Close", self._dialog.close, "close").props("dense")
            with ui.tabs().props("no-caps align=left dense mobile-arrows outside-arrows") as tabs:
                for name in TABS:
                    if name != "Page" or info.file_bytes:
                        ui.tab(name, f"{name} ({len(used)})" if name == "Questions" else name)
            with ui.tab_panels(tabs, value="Text", animated=False).classes("viewed"):
                with ui.tab_panel("Text"):
                    _show_parts(text, place)
                with ui.tab_panel("Page"):
                    page = PageView(self._engine_thread, info, place)
                with ui.tab_panel("Chunks"):
                    await _ChunkList(self._engine_thread, info).more()
                with ui.tab_panel("Metadata"):
                    saves = await to_thread.run_sync(service.kv.question_saves, info)
                    _show_facts(_metadata(info, sizes, saves, self._tenant))
                with ui.tab_panel("Version"):
                    _show_version(info)
                with ui.tab_panel("Questions"):
                    self._show_questions(used)

        async def draw(change: ValueChangeEventArguments[Any]) -> None:
            if change.value == "Page":
                await page.open()

        tabs.on_value_change(draw)
        self._dialog.open()

    def _show_questions(self, used: list[RecordedAnswer]) -> None:
        if not used:
            ui.label("None of the latest answers was read from this document.").classes("note")
        for recorded in used:
            with ui.element("div").classes("used"):
                button = ui.element("button").classes("link").props("type=button")
                button.on("click", partial(self._open_question, recorded.id), args=[])
                with button:
                    ui.label(recorded.answer.question)
                ui.label(recorded.answer.answer)
                Moment(recorded.when).classes("note")

    async def _open_question(self, id: str) -> None:
        self._dialog.close()
        await self._open_answer(id)


class _ChunkList:
    """The chunks of a document, some at a time. Built in the current element."""

    def __init__(self, engine_thread: EngineThread, info: DocumentInfo):
        self._service, self._info, self._after = engine_thread.catalog_service, info, -1
        self._list = ui.element("div")
        self._button = quiet_button("Show more", self.more)

    async def more(self) -> None:
        """Show the next chunks."""
        read = partial(self._service.chunk_page, self._info.collection, self._info.id, self._after, CHUNKS + 1)
        try:
            _, chunks = await to_thread.run_sync(read)
        except NotFound:
            ui.notify("This document is no longer stored.")
            return
        with self._list:
            for chunk in chunks[:CHUNKS]:
                self._show(chunk)
        self._after = chunks[:CHUNKS][-1].ordinal if chunks else self._after
        self._button.set_visibility(len(chunks) > CHUNKS)

    def _show(self, chunk: Chunk) -> None:
        with ui.element("section").classes("chunk"):
            place = place_of(chunk, chunk.id, self._info.title)
            ui.label(f"{place} · {count(len(chunk.tokens))} tokens").classes("note")
            face = form_of(self._info.id, self._info.metadata, chunk.text)
            ui.label(chunk.text).classes(f"text {face}")


def answers_from(engine_thread: EngineThread, tenant: Tenant, collection: str, id: str) -> list[RecordedAnswer]:
    """Return the kept answers of a tenant that were read from a document, newest first."""
    history = engine_thread.history
    found = engine_thread.catalog_service.answers(tenant.name, history.limit, float("inf"))
    return [each for each in found if each.collection == collection and id in each.documents]


def _show_parts(text: str, place: Place | None) -> None:
    """Show a text, a part at a time. The first part goes on until the place, if that is not too far."""
    start, words = place if place is not None and text.startswith(place[1], place[0]) else (0, "")
    end = start + len(words)
    if end > FIRST:
        start, words, end = 0, "", 0
    shown, position = ui.element("div"), max(PART, end)
    with shown:
        MarkedText(text[:start], words, text[end:position])

    def more() -> None:
        nonlocal position
        with shown:
            MarkedText(text[position : position + PART])
        position += PART
        button.set_visibility(position < len(text))

    button = quiet_button("Show more", more)
    button.set_visibility(position < len(text))


def _show_facts(facts: dict[str, str]) -> None:
    with ui.element("dl").classes("facts"):
        for name, value in facts.items():
            with ui.element("dt"):
                ui.label(name)
            with ui.element("dd"):
                ui.label(value)


def _metadata(info: DocumentInfo, sizes: KVSizes, saves: float | None, tenant: Tenant) -> dict[str, str]:
    """Return what is known about a document by name. The metadata of its user comes last."""
    own = {name: value if isinstance(value, str) else json.dumps(value) for name, value in info.metadata.items()}
    return {
        "Id": info.id,
        "Collection": tenant.outside(info.collection),
        "Text": size(info.bytes),
        **({"File": size(info.file_bytes)} if info.file_bytes else {}),
        "Chunks": count(info.chunks),
        "Tokens": count(info.tokens),
        "KV as computed": size(sizes.computed),
        "KV in the store": size(sizes.stored),
        "A question over it saves": NONE if saves is None else f"about {duration(saves)} to the first token",
        **own,
    }


def _show_version(info: DocumentInfo) -> None:
    ui.label(f"Version {info.version}").classes("title")
    with ui.row():
        ui.label("stored")
        Moment(info.updated)
    with ui.row():
        ui.label("first version stored")
        Moment(info.created)
    _show_facts({"Hash of the content": info.content_hash})
    ui.label("A new upload with the same id replaces the document. Earlier contents are not kept.").classes("note")
