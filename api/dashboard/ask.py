"""Ask: a question, its answer as it comes, and what the model read for it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import MutableMapping
from concurrent.futures import CancelledError
from typing import Any

from fastapi import FastAPI
from nicegui import ui

from api.dashboard.answers import draw, said
from api.errors import fault_of
from api.runtime.answer_stream import AnswerStream
from api.runtime.request_context import RequestContext, bind
from api.runtime.tenants import Tenant
from ragkv.report import Answer
from ragkv.types import AskOptions


class Ask:
    """Draws itself where it is made."""

    def __init__(self, app: FastAPI, tenant: Tenant):
        self._worker, self._settings, self._tenant = app.state.worker, app.state.settings, tenant
        self._asking: AnswerStream | None = None
        with ui.element("section").classes("card").props('aria-label="Ask"'):
            self._question = ui.textarea("Question").props("outlined autogrow rows=2").classes("w-full")
            self._question.on("keydown.enter.exact.prevent", self._ask)
            with ui.row().classes("line"):
                with ui.row():
                    self._collection = ui.input("Collection", value="default").props("dense outlined")
                    methods = ["", *self._worker.methods]
                    self._method = (
                        ui.select(
                            {method: method or f"as set ({self._settings.method or 'default'})" for method in methods},
                            value="",
                            label="Method",
                        )
                        .props("dense outlined options-dense")
                        .classes("method")
                    )
                with ui.row():
                    self._stop = ui.button("Stop", on_click=self._leave).props("flat no-caps")
                    self._go = ui.button("Ask", on_click=self._ask).props("no-caps unelevated")
        with ui.element("section").classes("card").props('aria-label="Answer" aria-live=polite') as self._shown:
            self._answer = ui.label().classes("answer")
            self._fault = ui.label().classes("fault").props("role=alert")
            self._note = ui.label().classes("note")
            self._read = ui.element("div").props('aria-label="What was read"')
        self._shown.set_visibility(False)
        self._stop.set_visibility(False)
        ui.context.client.on_delete(self._leave)

    async def _ask(self) -> None:
        if self._asking is not None or not self._question.value.strip():
            return
        self._answer.set_text("")
        self._fault.set_text("")
        self._note.set_text("waiting for a place …")
        self._read.clear()
        self._busy(True)
        try:
            id = uuid.uuid4().hex
            bind(RequestContext(id, self._tenant.name))
            self._asking = self._begin()
            known = await self._asking.prefilled()
            self._note.set_text(f"reading {len(known.citations)} chunks …")
            async for piece in self._asking.pieces():
                self._answer.set_text(self._answer.text + piece)
            await self._tell(self._asking.answer(), id)
        except CancelledError:
            self._note.set_text("stopped")
        except Exception as error:
            self._fault.set_text(fault_of(error).detail)
            self._note.set_text("")
        finally:
            self._leave()
            self._busy(False)

    def _begin(self) -> AnswerStream:
        question, method = self._question.value, self._method.value or None
        collection = self._tenant.inside(self._collection.value.strip() or "default")

        options = AskOptions(collection=collection, method=method)
        return AnswerStream(self._worker, _silence, question, options, self._tenant.name, self._settings.deadline, True)

    async def _tell(self, answer: Answer, id: str) -> None:
        self._answer.set_text(answer.answer)
        answered = self._worker.history.find(self._tenant.name, id)
        self._note.set_text(said(answer.report, answered.full_ms if answered else 0.0))
        if answered is not None:
            with self._read:
                await draw(self._worker, answered)

    def _leave(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _busy(self, busy: bool) -> None:
        self._shown.set_visibility(True)
        self._stop.set_visibility(busy)
        self._go.set_enabled(not busy)


async def _silence() -> MutableMapping[str, Any]:
    """The page tells by itself when nobody waits any more; until then nothing comes."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody ends it")
