"""One question and its answer: the text, the passages that it was answered from, and the map of the KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from anyio import to_thread
from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from ragkv.api.dashboard.formatting import duration, percent
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.catalog_service import CatalogService
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.schemas.history import to_answer_map
from ragkv.passages import Citation
from ragkv.report import NOT_HELD, Answer, Report, describe_confidence
from ragkv.types import Chunk

Place = tuple[int, str]
"""A place in a document: an offset, and the words that stand there."""
OpenDocument = Callable[[str, str, Place | None], Any]
"""Shows a document in the viewer. Arguments: internal name of the collection, id of the document, place to show."""


class AnswerView(Element, component="answer.js"):
    """A question, its answer and its passages, drawn by answer.js, which names the properties."""

    def __init__(self, question: str, on_document: Callable[[int], Any]):
        super().__init__()
        self._props["question"] = question
        self.on("document", lambda event: on_document(int(event.args)))

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

    def __init__(self, engine_thread: EngineThread, question: str, open_document: OpenDocument):
        self._service: CatalogService = engine_thread.catalog_service
        self._open_document = open_document
        self._recorded: RecordedAnswer | None = None
        with ui.element("article").classes("turn").props('role=region aria-label="Answer"') as self._element:
            self._view = AnswerView(question, self._open_cited)
            self._view.props("aria-live=polite")

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
        sources = [to_source(number, citation) for number, citation in enumerate(answer.citations, start=1)]
        self._view.show(
            text=answer.answer,
            note=describe_answer(answer, recorded.full_ms),
            busy=False,
            fault="",
            sources=sources,
        )
        with self._element:
            await _add_map(self._service, recorded, with_map)

    async def _open_cited(self, number: int) -> None:
        """Open the document of a citation where it was cited. number: as in `to_source`."""
        assert self._recorded is not None, "there are no citations before the answer"
        citation = self._recorded.answer.citations[number - 1]
        await self._open_document(self._recorded.collection, citation.document_id, cited_place(citation))


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


def to_source(number: int, citation: Citation) -> dict[str, Any]:
    """Return what answer.js shows of a citation. number: the number that the page cites it by, from 1."""
    return {
        "number": number,
        "title": citation.title or citation.document_id,
        "place": describe_place(citation.chunk, citation.heading, citation.page, citation.title),
        "holds": bool(citation.marks),
        "parts": split_at_marks(citation),
    }


def cited_place(citation: Citation) -> Place | None:
    """Return the first words of the answer in a citation; without any, its whole text. None if its place is unknown."""
    if citation.start is None:
        return None
    if not citation.marks:
        return citation.start, citation.text
    mark = citation.marks[0]
    return mark.start, citation.text[mark.start - citation.start : mark.end - citation.start]


def split_at_marks(citation: Citation) -> list[tuple[str, bool]]:
    """Split the text of a citation into (part, whether it is marked). The parts together are the text."""
    text, position, parts = citation.text, 0, list[tuple[str, bool]]()
    for mark in citation.marks:
        start, end = (max(position, offset - (citation.start or 0)) for offset in (mark.start, mark.end))
        parts += [(text[position:start], False), (text[start:end], True)]
        position = max(start, end)
    return [part for part in (*parts, (text[position:], False)) if part[0]]


def describe_place(chunk: int, heading: str | None, page: int | None, title: str) -> str:
    """Say where a chunk stands in its document.

    Args:
        chunk: Position of the chunk, from 0.
        heading: Heading that it stands under.
        page: Number of its page.
        title: Title that is shown beside the place. A heading that only repeats it is left out.
    """
    places = (page and f"page {page}", heading if heading != title else "", f"chunk {chunk + 1}")
    return " · ".join(place for place in places if place)


def place_of(chunk: Chunk | None, chunk_id: str, title: str) -> str:
    """Say where a chunk stands in its document, as far as it is known.

    Args:
        chunk: The chunk; None if it is no longer stored.
        chunk_id: Its id.
        title: As in `describe_place`.
    """
    span = chunk.span if chunk else None
    ordinal = chunk.ordinal if chunk else int(chunk_id.rpartition("#")[2])
    return describe_place(ordinal, span.heading if span else None, span.page if span else None, title)


def describe_answer(answer: Answer, full_ms: float) -> str:
    """Say how sure an answer is and how long its first token took, beside the time without stored KV.

    Args:
        answer: The answer.
        full_ms: Estimated milliseconds with full recompute; 0 if unknown.
    """
    report = answer.report
    nothing = "" if answer.citations else "The passages that were found do not say. "
    if report.held == 0 and not report.abstained:
        nothing = f"{NOT_HELD} "
    sure = "" if report.confidence is None else f"{describe_confidence(report.confidence).capitalize()}. "
    took = f"First token after {duration(report.timings_ms.ttft / 1000)}"
    without = f"; a full recompute would take about {duration(full_ms / 1000)}." if full_ms else "."
    return f"{nothing}{sure}{took}{without}"


def describe_report(report: Report) -> str:
    """Describe how an answer was read in one line."""
    ratios, selection = report.ratios, report.selection
    parts = [
        f"Method {report.method}",
        f"chunks in the cache {percent(ratios.cache_hit)}",
        f"bytes loaded {percent(ratios.load)}",
    ]
    if selection.promised is not None:
        kinds = ", ".join(selection.evidence)
        parts.append(f"blocks chosen by {kinds}, {percent(selection.promised)} of the evidence kept")
    return " · ".join(parts)
