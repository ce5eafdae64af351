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
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from ragkv.api.dashboard.answer_card import AnswerCard, OpenDocument
from ragkv.api.dashboard.buttons import confirm_deletion, main_button, quiet_button
from ragkv.api.dashboard.examples import EXAMPLES, example_questions
from ragkv.api.errors import fault_of
from ragkv.api.middleware.rate_limit import quota_fault
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.peers import Peers
from ragkv.api.runtime.rate_limits import RateLimiter
from ragkv.api.runtime.request_context import RequestContext, bind
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.history import QUESTION_CHARS
from ragkv.config import Settings
from ragkv.engine.registry import ALONE
from ragkv.errors import NotFound
from ragkv.types import AskOptions

LATEST = 30
"""Questions at the side."""
_REMEMBER = "The model also reads the questions and answers above that were asked with this on."


class HistoryList(Element, component="history.js"):
    """The latest questions of a tenant."""

    def __init__(self, on_open: Callable[[GenericEventArguments], Any]):
        super().__init__()
        self._props["items"] = []
        self.on("open", on_open)

    def show(self, **props: Any) -> None:
        """Change some properties."""
        self._props.update(props)


class AskPanel:
    """A thread of questions and answers. Answers one question at a time."""

    def __init__(self, app: FastAPI, tenant: Tenant, open_document: OpenDocument, add_documents: Callable[[], None]):
        self._engine_thread: EngineThread = app.state.engine_thread
        self._limiter: RateLimiter = app.state.limiter
        self._settings: Settings = app.state.settings
        self._peers: Peers = app.state.peers
        self._tenant, self._open_document, self._add_documents = tenant, open_document, add_documents
        self._stream: AnswerStream | None = None
        self._conversation = _new_name()
        self._held: tuple[str, str] | None = None  # collection and name of the shown conversation, if turns are kept
        self._shown_history: list[float] = []
        self._shown_examples = ""
        with ui.element("div").classes("ask"):
            with ui.element("aside").props('aria-label="History"'):
                ui.button("New conversation", icon="add", on_click=self._start_anew).props("no-caps flat").classes(
                    "new"
                )
                self._delete = quiet_button("Delete conversation", self._delete_conversation, "delete").props("dense")
                self._history = HistoryList(lambda event: self.open(str(event.args)))
            with ui.element("div").classes("talk"):
                with ui.element("div").classes("thread") as self._thread:
                    self._start = ui.element("div").classes("start")
                self._build_form()
        self._stop.set_visibility(False)
        self._delete.set_visibility(False)
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
        found = await to_thread.run_sync(service.answers, self._tenant.name, LATEST, inf)
        if [each.when for each in found] != self._shown_history:
            self._shown_history = [each.when for each in found]
            self._history.show(items=[_item(each) for each in found])
        await self._show_examples(names[self._collection.value])

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
        self._start.set_visibility(False)
        self._history.show(shown=chosen.id)
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
            with self._thread:
                card = AnswerCard(self._engine_thread, recorded.answer.question, self._open_document)
            await card.show_recorded(recorded)

    async def _show_examples(self, count: int) -> None:
        """Fill the empty thread with examples for the chosen collection."""
        state = repr((self._collection.value, count))
        if not self._start.visible or state == self._shown_examples:
            return
        self._shown_examples = state
        page = partial(self._engine_thread.catalog_service.page, self._inside, None, 20 * EXAMPLES)
        questions = example_questions(await to_thread.run_sync(page))
        self._start.clear()
        with self._start:
            ui.label("Ask your documents").classes("welcome").props("role=heading aria-level=2")
            if not questions:
                ui.label("This collection has no documents yet.").classes("note")
                main_button("Add documents", self._add_documents, "upload_file")
                return
            ui.label("The answer comes with the passages that it was read from. For example:").classes("note")
            with ui.element("div").classes("examples"):
                for question in questions:
                    ui.button(question, on_click=partial(self._ask_example, question)).props(
                        "outline no-caps align=left"
                    )

    @property
    def _inside(self) -> str:
        return self._tenant.inside(self._collection.value)

    async def _ask_example(self, question: str) -> None:
        self._question.value = question
        await self._ask()

    async def _ask(self) -> None:
        question = self._question.value.strip()
        if self._stream is not None or not question:
            return
        self._start.set_visibility(False)
        with self._thread:
            card = AnswerCard(self._engine_thread, question, self._open_document)
        card.show(note="Waiting in the queue …", busy=True)
        self._set_busy(True)
        self._scroll_to_end()
        try:
            await self._answer(question, card)
        except CancelledError:
            card.show(note="Stopped.", busy=False)
        except Exception as error:
            card.show(fault=self._tenant.told(fault_of(error).detail), note="", busy=False)
        finally:
            self._cancel()
            self._set_busy(False)

    async def _answer(self, question: str, card: AnswerCard) -> None:
        if (exhausted := self._limiter.admit(self._tenant.name, ("tokens",))) is not None:
            card.show(fault=quota_fault(exhausted).detail, note="", busy=False)
            return
        request_id, text = uuid.uuid4().hex, ""
        bind(RequestContext(request_id, self._tenant.name))
        self._stream = stream = self._start_stream(question)
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
        self._history.show(shown=request_id)
        self._hold(recorded)
        await card.show_recorded(recorded)
        await self.refresh()
        self._scroll_to_end()

    def _start_stream(self, question: str) -> AnswerStream:
        method = self._method.value or None
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

    def _hold(self, recorded: RecordedAnswer) -> None:
        """Offer to delete the conversation of an answer, if it has one."""
        if recorded.conversation:
            self._held = recorded.collection, recorded.conversation
            self._delete.set_visibility(True)

    def _start_anew(self) -> None:
        """Empty the thread."""
        self._cancel()
        for element in list(self._thread.default_slot.children):
            if element is not self._start:
                self._thread.remove(element)
        self._conversation, self._held = _new_name(), None
        self._delete.set_visibility(False)
        self._history.show(shown="")
        self._start.set_visibility(True)

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


def _item(recorded: RecordedAnswer) -> dict[str, Any]:
    answer = recorded.answer
    return {
        "id": recorded.id,
        "when": recorded.when,
        "question": answer.question[:QUESTION_CHARS],
        "answer": answer.answer[:QUESTION_CHARS],
    }


def _select(label: str, options: dict[str, str], value: str) -> ui.select:
    return ui.select(options, value=value, label=label).props("dense outlined options-dense").classes("choice")


def _new_name() -> str:
    """Return a name for a conversation."""
    return f"dashboard-{uuid.uuid4().hex}"


async def _wait_forever() -> MutableMapping[str, Any]:
    """Replace the `receive` of a request. No message ever comes: the page cancels the stream when it is closed."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the future is never resolved")
