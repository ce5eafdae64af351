"""The Ask tab: a question, its streamed answer, and the map of the blocks that the model read."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import MutableMapping
from concurrent.futures import CancelledError
from typing import Any

from fastapi import FastAPI
from nicegui import ui

from api.dashboard.answers import describe_report, show_map
from api.errors import fault_of
from api.runtime.answer_stream import AnswerStream
from api.runtime.engine_thread import EngineThread
from api.runtime.request_context import RequestContext, bind
from api.runtime.tenants import Tenant
from ragkv.config import Settings
from ragkv.report import Answer
from ragkv.types import AskOptions


class AskPanel:
    """A form for a question, and its answer. Answers one question at a time."""

    def __init__(self, app: FastAPI, tenant: Tenant):
        self._engine_thread: EngineThread = app.state.engine_thread
        self._settings: Settings = app.state.settings
        self._tenant = tenant
        self._stream: AnswerStream | None = None
        self._build_form()
        with ui.element("section").classes("card").props('aria-label="Answer" aria-live=polite') as self._shown:
            self._answer = ui.label().classes("answer")
            self._fault = ui.label().classes("fault").props("role=alert")
            self._note = ui.label().classes("note")
            self._map = ui.element("div").props('aria-label="What was read"')
        self._shown.set_visibility(False)
        self._stop.set_visibility(False)
        ui.context.client.on_delete(self._cancel)

    def _build_form(self) -> None:
        with ui.element("section").classes("card").props('aria-label="Ask"'):
            self._question = ui.textarea("Question").props("outlined autogrow rows=2").classes("w-full")
            self._question.on("keydown.enter.exact.prevent", self._ask)
            with ui.row().classes("line"):
                with ui.row():
                    self._collection = ui.input("Collection", value="default").props("dense outlined")
                    methods = ["", *self._engine_thread.methods]
                    default = f"as set ({self._settings.method or 'default'})"
                    self._method = (
                        ui.select({method: method or default for method in methods}, value="", label="Method")
                        .props("dense outlined options-dense")
                        .classes("method")
                    )
                with ui.row():
                    self._stop = ui.button("Stop", on_click=self._cancel).props("flat no-caps")
                    self._go = ui.button("Ask", on_click=self._ask).props("no-caps unelevated")

    async def _ask(self) -> None:
        if self._stream is not None or not self._question.value.strip():
            return
        self._answer.set_text("")
        self._fault.set_text("")
        self._note.set_text("waiting in the queue …")
        self._map.clear()
        self._set_busy(True)
        try:
            request_id = uuid.uuid4().hex
            bind(RequestContext(request_id, self._tenant.name))
            self._stream = self._start_stream()
            retrieval = await self._stream.prefilled()
            self._note.set_text(f"reading {len(retrieval.citations)} chunks …")
            async for piece in self._stream.pieces():
                self._answer.set_text(self._answer.text + piece)
            await self._show(self._stream.answer(), request_id)
        except CancelledError:
            self._note.set_text("stopped")
        except Exception as error:
            self._fault.set_text(fault_of(error).detail)
            self._note.set_text("")
        finally:
            self._cancel()
            self._set_busy(False)

    def _start_stream(self) -> AnswerStream:
        collection = self._tenant.inside(self._collection.value.strip() or "default")
        question, options = self._question.value, AskOptions(collection=collection, method=self._method.value or None)
        return AnswerStream(
            self._engine_thread,
            _wait_forever,
            question,
            options,
            self._tenant.name,
            self._settings.deadline,
            True,
        )

    async def _show(self, answer: Answer, request_id: str) -> None:
        self._answer.set_text(answer.answer)
        recorded = self._engine_thread.history.find(self._tenant.name, request_id)
        self._note.set_text(describe_report(answer.report, recorded.full_ms if recorded else 0.0))
        if recorded is not None:
            with self._map:
                await show_map(self._engine_thread, recorded)

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _set_busy(self, busy: bool) -> None:
        self._shown.set_visibility(True)
        self._stop.set_visibility(busy)
        self._go.set_enabled(not busy)


async def _wait_forever() -> MutableMapping[str, Any]:
    """Replace the `receive` of a request. No message ever comes: the page cancels the stream when it is closed."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the future is never resolved")
