"""One question and its answer: the text, the passages that it was answered from, and the map of the KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from ragkv.api.dashboard.answer_text import (
    OpenDocument,
    Place,
    cited_place,
    deciding_of,
    describe_answer,
    describe_report,
    describe_searched,
    needs_search,
    place_of,
    searched_source,
    to_source,
)
from ragkv.api.dashboard.formatting import percent
from ragkv.api.dashboard.passage_form import DRAWN, drawn, form_of
from ragkv.api.runtime.answer_history import Rating, RecordedAnswer
from ragkv.api.runtime.catalog_service import CatalogService
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.schemas.history import to_answer_map


class AnswerView(Element, component="answer.js"):
    """A question, its answer and its passages, drawn by answer.js, which names the properties."""

    def __init__(self, question: str, on_document: Callable[[int], Any], on_rate: Callable[[str], Any]):
        super().__init__()
        self._props["question"] = question
        self.on("document", lambda event: on_document(int(event.args)))
        self.on("rate", lambda event: on_rate(str(event.args)))

    def show(self, **props: Any) -> None:
        """Change some properties."""
        self._props.update(props)


class KVMapView(Element, component="kvmap.js"):
    """The map of an answer, from the JSON of `GET /v1/answers/{id}/map` and the place of each chunk."""

    def __init__(self, map: dict[str, Any], labels: list[str]):
        super().__init__()
        self._props.update({"map": map, "places": labels})


class AnswerCard:
    """A question on the page. Built in the current element."""

    def __init__(
        self,
        engine_thread: EngineThread,
        question: str,
        open_document: OpenDocument,
        ask_again: Callable[[str], Any] | None = None,
    ):
        """Show the question.

        Args:
            engine_thread: Has the answers and the documents.
            question: The question.
            open_document: Shows a document.
            ask_again: Asks a question again with the method `full`; None where this is not offered.
        """
        self._engine_thread, self._service = engine_thread, engine_thread.catalog_service
        self._open_document = open_document
        self._recorded: RecordedAnswer | None = None
        with ui.element("article").classes("turn").props('role=region aria-label="Answer"') as self._element:
            self._view = AnswerView(question, self._open_cited, self._rate)
            self._view.props("aria-live=polite")
        self._cited: list[tuple[str, Place | None]] = []
        self._asks_again = ask_again is not None
        if ask_again is not None:
            self._view.on("again", lambda: ask_again(question), args=[])

    @property
    def recorded(self) -> RecordedAnswer | None:
        """The answer with its rating; None before it is there."""
        return self._recorded

    def show(self, **props: Any) -> None:
        """Change what is shown while the answer is on its way: `text`, `note`, `fault`, `busy`."""
        self._view.show(**props)

    async def show_recorded(self, recorded: RecordedAnswer, with_map: bool = False) -> None:
        """Show the answer as it was recorded.

        Args:
            recorded: The answer.
            with_map: Whether the map is open at once.
        """
        self._recorded = recorded
        answer = recorded.answer
        sources = await self._passages(recorded)
        self._view.show(
            text=answer.answer,
            note=describe_answer(answer, recorded.full_ms),
            busy=False,
            fault="",
            sources=sources,
            searched=describe_searched(answer) if needs_search(answer) else "",
            deciding=deciding_of(answer, sources),
            actions=True,
            again=self._asks_again and answer.report.method != "full",
            rating=recorded.rating,
        )
        with self._element:
            await _add_map(self._service, recorded, with_map)

    async def _passages(self, recorded: RecordedAnswer) -> list[dict[str, Any]]:
        """Return the passages of an answer; of one that cites nothing, those that were searched."""
        citations = recorded.answer.citations
        if citations:
            self._cited = [(each.document_id, cited_place(each)) for each in citations]
            found = [to_source(number, citation) for number, citation in enumerate(citations, start=1)]
        else:
            chunks = [each for each in await to_thread.run_sync(self._service.chunks, recorded) if each is not None]
            self._cited = [(each.document_id, (each.span.start, each.text) if each.span else None) for each in chunks]
            found = [searched_source(number, chunk) for number, chunk in enumerate(chunks, start=1)]
        await to_thread.run_sync(self._add_forms, recorded.collection, found)
        return found

    def _add_forms(self, collection: str, passages: list[dict[str, Any]]) -> None:
        """Add the form of each passage, and of Markdown the tree of its elements."""
        for passage, (document_id, _) in zip(passages, self._cited, strict=True):
            info = self._service.find(collection, document_id)
            text = "".join(part for part, _ in passage["parts"])
            passage["form"] = form_of(document_id, info.metadata if info else {}, text)
            if passage["form"] == DRAWN:
                passage["nodes"] = drawn(passage["parts"])

    async def _open_cited(self, number: int) -> None:
        """Open the document of a passage at its place. number: as in `to_source`."""
        assert self._recorded is not None, "there are no passages before the answer"
        document_id, place = self._cited[number - 1]
        await self._open_document(self._recorded.collection, document_id, place)

    async def _rate(self, rating: str) -> None:
        """Keep what the user thinks of the answer with it."""
        assert self._recorded is not None, "there is nothing to rate before the answer"
        chosen: Rating = "up" if rating == "up" else "down" if rating == "down" else ""
        history, recorded = self._engine_thread.history, self._recorded
        rated = await to_thread.run_sync(history.rate, recorded.tenant, recorded.id, chosen)
        if rated is None:
            ui.notify("This answer is no longer kept.")
        else:
            self._recorded = rated
            self._view.show(rating=rated.rating)


async def _add_map(service: CatalogService, recorded: RecordedAnswer, opened: bool) -> None:
    """Add the map, which is built when it is opened."""
    ratios = recorded.answer.report.ratios
    with ui.element("details").classes("reading") as details:
        with ui.element("summary"):
            ui.label("Map of the KV blocks")
            ui.label(f"kept {percent(ratios.sequence)} · recomputed {percent(ratios.recompute)}").classes("note")
        content = ui.element("div")

    async def fill() -> None:
        if content.default_slot.children:
            return
        with content:
            ui.label(describe_report(recorded.answer.report)).classes("note")
            await show_map(service, recorded)

    async def on_toggle(event: GenericEventArguments) -> None:
        if event.args:
            await fill()

    details.on("toggle", on_toggle, js_handler="(event) => emit(event.target.open)")
    if opened:
        details.props("open")
        await fill()


async def show_map(service: CatalogService, recorded: RecordedAnswer) -> None:
    """Show the map of an answer in the current element."""
    chunks = await to_thread.run_sync(partial(service.chunks, recorded))
    texts = await to_thread.run_sync(partial(service.texts, recorded))
    places = [
        place_of(chunk, shown.chunk_id, shown.title) for chunk, shown in zip(chunks, recorded.map.chunks, strict=True)
    ]
    KVMapView(to_answer_map(recorded, texts), places)
