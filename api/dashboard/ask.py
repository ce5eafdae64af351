"""The Ask tab: questions and answers one below the other, and the latest questions at the side."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, MutableMapping
from concurrent.futures import CancelledError
from functools import partial
from math import inf
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from nicegui import ui

from ragkv.api.dashboard.answer_card import AnswerCard
from ragkv.api.dashboard.answer_text import OpenDocument
from ragkv.api.dashboard.buttons import confirm_deletion, main_button, quiet_button
from ragkv.api.dashboard.export import as_json, as_markdown
from ragkv.api.dashboard.history import HistoryPanel
from ragkv.api.dashboard.start import StartPanel
from ragkv.api.errors import fault_of
from ragkv.api.middleware.rate_limit import quota_fault
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.peers import Peers
from ragkv.api.runtime.rate_limits import RateLimiter
from ragkv.api.runtime.request_context import RequestContext, bind
from ragkv.api.runtime.tenants import Tenant
from ragkv.config import Settings
from ragkv.engine.registry import ALONE, FULL
from ragkv.errors import NotFound
from ragkv.types import AskOptions

_REMEMBER = "The model also reads the questions and answers above that were asked with this on."


class AskPanel:
    """A thread of questions and answers. Answers one question at a time."""

    def __init__(self, app: FastAPI, tenant: Tenant, open_document: OpenDocument, add_documents: Callable[[], None]):
        self._engine_thread: EngineThread = app.state.engine_thread
        self._limiter: RateLimiter = app.state.limiter
        self._settings: Settings = app.state.settings
        self._peers: Peers = app.state.peers
        self._tenant, self._open_document = tenant, open_document
        self._stream: AnswerStream | None = None
        self._conversation = _new_name()
        self._held: tuple[str, str] | None = None  # collection and name of the shown conversation, if turns are kept
        self._cards: list[AnswerCard] = []
        with ui.element("div").classes("ask"):
            with ui.element("aside").props('aria-label="History"'):
                ui.button("New conversation", icon="add", on_click=self._start_anew).props("no-caps flat").classes(
                    "new"
                )
                self._delete = quiet_button("Delete conversation", self._delete_conversation, "delete").props("dense")
                self._export = quiet_button("Export", lambda: None, "download").props("dense")
                with self._export, ui.menu():
                    ui.menu_item("Markdown", self._export_markdown)
                    ui.menu_item("JSON", self._export_json)
                self._history = HistoryPanel(self._engine_thread, tenant, self.open, self._removed)
            with ui.element("div").classes("talk"):
                with ui.element("div").classes("thread") as self._thread:
                    self._start = StartPanel(app.state.examples, self._ask_example, add_documents)
                self._build_form()
        for button in (self._stop, self._delete, self._export):
            button.set_visibility(False)
        ui.context.client.on_delete(self._cancel)

    def _build_form(self) -> None:
        with ui.element("section").classes("card composer").props('aria-label="Ask"') as self._form:
            self._question = ui.textarea("Question").props("outlined autogrow rows=1 dense").classes("w-full")
            self._question.on("keydown.enter.exact.prevent", self._ask)
            # Where the page is narrow, the choices are folded: they would cover the answer.
            self._unfold = quiet_button("", self._toggle_choices, "tune").classes("unfold")
            self._unfold.props('round dense aria-label="Choices" aria-expanded=false')
            with ui.element("div").classes("choices"):
                self._collection = _select("Collection", {"default": "default"}, "default")
                methods = {"": f"as set ({self._settings.method or 'default'})"}
                methods |= {method: method for method in self._engine_thread.methods}
                self._method = _select("Method", methods, "")
                self._remember = ui.switch("Remember").props("dense").tooltip(_REMEMBER)
                self._remember.props(f'aria-description="{_REMEMBER}"')
            self._stop = quiet_button("Stop", self._cancel)
            self._go = main_button("Ask", self._ask)

    def _toggle_choices(self) -> None:
        self._form.classes(toggle="unfolded")
        self._unfold.props(f"aria-expanded={'true' if 'unfolded' in self._form.classes else 'false'}")

    async def refresh(self) -> None:
        """Show the current collections and the latest questions."""
        service = self._engine_thread.catalog_service
        collections = await to_thread.run_sync(service.collections, self._tenant.inside(""))
        names = {self._tenant.outside(each.name): each.documents for each in collections} or {"default": 0}
        options = {name: f"{name} ({count})" for name, count in names.items()}
        if options != self._collection.options:
            value = self._collection.value if self._collection.value in options else next(iter(options))
            self._collection.set_options(options, value=value)
        await self._history.refresh()
        await self._start.refresh(next((each for each in collections if each.name == self._inside), None))

    async def open(self, id: str) -> None:
        """Show an answer of the history, with the other answers of its conversation."""
        if self._stream is not None:
            return
        service = self._engine_thread.catalog_service
        try:
            chosen = await to_thread.run_sync(service.answer, self._tenant.name, id)
        except NotFound as error:
            ui.notify(error.public)
            return
        self._start_anew()
        self._start.element.set_visibility(False)
        self._history.mark(chosen.id)
        shown = [chosen]
        if chosen.conversation:
            self._conversation, self._remember.value = chosen.conversation, True
            self._hold(chosen)
            found = await to_thread.run_sync(service.answers, self._tenant.name, self._settings.history, inf)
            of = (chosen.collection, chosen.conversation)
            shown = [each for each in reversed(found) if (each.collection, each.conversation) == of]
        name = self._tenant.outside(chosen.collection)
        if name in self._collection.options:
            self._collection.value = name
        for recorded in shown:
            await self._add_card(recorded.answer.question).show_recorded(recorded)
        self._export.set_visibility(True)

    @property
    def _inside(self) -> str:
        return self._tenant.inside(self._collection.value)

    async def _ask_example(self, question: str) -> None:
        self._question.value = question
        await self._ask()

    def _add_card(self, question: str) -> AnswerCard:
        """Add a question to the thread."""
        with self._thread:
            card = AnswerCard(self._engine_thread, question, self._open_document, self._ask_again)
        self._cards.append(card)
        return card

    async def _ask(self) -> None:
        await self._ask_with(self._question.value.strip(), self._method.value or None)

    async def _ask_again(self, question: str) -> None:
        await self._ask_with(question, FULL)

    async def _ask_with(self, question: str, method: str | None) -> None:
        if self._stream is not None or not question:
            return
        self._start.element.set_visibility(False)
        card = self._add_card(question)
        card.show(note="Waiting in the queue …", busy=True)
        self._set_busy(True)
        self._scroll_to_end()
        try:
            await self._answer(question, method, card)
        except CancelledError:
            card.show(note="Stopped.", busy=False)
        except Exception as error:
            card.show(fault=self._tenant.told(fault_of(error).detail), note="", busy=False)
        finally:
            self._cancel()
            self._set_busy(False)

    async def _answer(self, question: str, method: str | None, card: AnswerCard) -> None:
        if (exhausted := self._limiter.admit(self._tenant.name, ("tokens",))) is not None:
            card.show(fault=quota_fault(exhausted).detail, note="", busy=False)
            return
        request_id, text = uuid.uuid4().hex, ""
        bind(RequestContext(request_id, self._tenant.name, origin="page"))
        self._stream = stream = self._start_stream(question, method)
        if self._question.value.strip() == question:
            self._question.value = ""
        retrieval = await stream.prefilled()
        card.show(note=f"Reading {len(retrieval.citations)} passages …")
        async for piece in stream.pieces():
            text += piece
            card.show(text=text)
        recorded = self._engine_thread.history.find(self._tenant.name, request_id)
        if recorded is None:  # the service keeps no answers
            card.show(text=stream.answer().answer, note="", busy=False)
            return
        self._history.mark(request_id)
        self._hold(recorded)
        await card.show_recorded(recorded)
        self._export.set_visibility(True)
        await self.refresh()
        self._scroll_to_end()

    def _start_stream(self, question: str, method: str | None) -> AnswerStream:
        name = (method or self._settings.method).partition(":")[0]
        remember = self._remember.value and name not in ALONE
        options = AskOptions(
            collection=self._inside, method=method, conversation=self._conversation if remember else None
        )
        return AnswerStream(
            self._engine_thread,
            _wait_forever,
            question,
            options,
            self._tenant.name,
            self._settings.deadline,
            True,
        )

    async def _delete_conversation(self) -> None:
        """Delete the remembered turns and their answers, once the user has agreed."""
        if self._stream is not None or self._held is None:
            return
        if await confirm_deletion("Delete this conversation and its answers?"):
            await self._engine_thread.remove_conversation(self._held, self._tenant.name)
            await self._peers.drop_conversation(*self._held)
            self._start_anew()
            await self.refresh()

    def _export_markdown(self) -> None:
        ui.download.content(as_markdown(self._exported), "conversation.md", "text/markdown")

    def _export_json(self) -> None:
        ui.download.content(as_json(self._exported, self._tenant), "conversation.json", "application/json")

    @property
    def _exported(self) -> list[RecordedAnswer]:
        """The answers of the thread that are still kept."""
        shown = [card.recorded for card in self._cards]
        find = partial(self._engine_thread.history.find, self._tenant.name)
        return [kept for each in shown if each is not None and (kept := find(each.id)) is not None]

    def _removed(self, id: str) -> None:
        """Empty the thread if it shows an answer that the user has deleted from the history."""
        if any(card.recorded is not None and card.recorded.id == id for card in self._cards):
            self._start_anew()

    def _hold(self, recorded: RecordedAnswer) -> None:
        """Offer to delete the conversation of an answer, if it has one."""
        if recorded.conversation:
            self._held = recorded.collection, recorded.conversation
            self._delete.set_visibility(True)

    def _start_anew(self) -> None:
        """Empty the thread."""
        self._cancel()
        for element in list(self._thread.default_slot.children):
            if element is not self._start.element:
                self._thread.remove(element)
        self._conversation, self._held = _new_name(), None
        self._cards.clear()
        for button in (self._delete, self._export):
            button.set_visibility(False)
        self._history.mark("")
        self._start.element.set_visibility(True)

    def _scroll_to_end(self) -> None:
        """Show the newest answer once the browser has drawn what was sent before."""
        scroll = "document.querySelector('.thread > :last-child')?.scrollIntoView({block: 'nearest'})"
        ui.run_javascript(f"requestAnimationFrame(() => requestAnimationFrame(() => {scroll}))")

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _set_busy(self, busy: bool) -> None:
        self._stop.set_visibility(busy)
        self._go.set_enabled(not busy)


def _select(label: str, options: dict[str, str], value: str) -> ui.select:
    return ui.select(options, value=value, label=label).props("dense outlined options-dense").classes("choice")


def _new_name() -> str:
    """Return a name for a conversation."""
    return f"dashboard-{uuid.uuid4().hex}"


async def _wait_forever() -> MutableMapping[str, Any]:
    """Replace the `receive` of a request. No message ever comes: the page cancels the stream when it is closed."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the future is never resolved")
