"""The empty start of a conversation: what can be asked, and questions that the documents answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nicegui import ui

from ragkv.api.dashboard.buttons import main_button
from ragkv.api.dashboard.examples import ExampleFinder
from ragkv.api.dashboard.formatting import quantity
from ragkv.catalog import CollectionInfo


class StartPanel:
    """What the page shows before the first question."""

    def __init__(self, examples: ExampleFinder, ask: Callable[[str], Any], add_documents: Callable[[], None]):
        """Add the panel to the current element.

        Args:
            examples: Finds the examples.
            ask: Asks a question.
            add_documents: Shows where documents are added.
        """
        self._examples, self._ask, self._add_documents = examples, ask, add_documents
        self._shown = ""
        self.element = ui.element("div").classes("start")

    async def refresh(self, info: CollectionInfo | None) -> None:
        """Show the examples for the chosen collection. info: None if it has no documents."""
        if not self.element.visible:
            return
        questions = await self._examples.questions(info) if info is not None else []
        searching = info is not None and self._examples.searching(info.name)
        state = repr((info and (info.name, info.documents), questions, searching))
        if state == self._shown:
            return
        self._shown = state
        self.element.clear()
        with self.element:
            ui.label("Ask your documents").classes("welcome").props("role=heading aria-level=2")
            if info is None:
                ui.label("This collection has no documents yet.").classes("note")
                main_button("Add documents", self._add_documents, "upload_file")
                return
            ui.label(_invitation(info.documents, len(questions), searching)).classes("note").props("aria-live=polite")
            with ui.element("div").classes("examples"):
                for question in questions:
                    ui.button(question, on_click=partial(self._ask, question)).props("outline no-caps align=left")


def _invitation(documents: int, examples: int, searching: bool) -> str:
    """Say what can be asked. examples: how many follow."""
    begins = f"Ask who, when, where or how many. The answer comes from {quantity(documents, 'document')}, "
    begins += "with the passages that it was read from."
    if examples:
        return f"{begins} These questions were tried, and are answered:"
    return f"{begins} Examples are being tried …" if searching else begins
