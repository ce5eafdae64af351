"""What the page says about an answer: its passages and their places, how sure it is, and how it was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ragkv.api.dashboard.formatting import duration, percent, quantity
from ragkv.engine.support import is_judgement, sentences, stems
from ragkv.passages import Citation, is_unknown, page_name
from ragkv.report import NOT_HELD, Answer, Report, describe_confidence
from ragkv.types import Chunk

Place = tuple[int, str]
"""A place in a document: an offset, and the words that stand there."""
OpenDocument = Callable[[str, str, Place | None], Any]
"""Shows a document in the viewer. Arguments: internal name of the collection, id of the document, place to show."""


def to_source(number: int, citation: Citation) -> dict[str, Any]:
    """Return what answer.js shows of a citation. number: the number that the page cites it by, from 1."""
    return {
        "number": number,
        "title": citation.title or citation.document_id,
        "place": describe_place(citation),
        "holds": bool(citation.marks),
        "parts": split_at_marks(citation),
    }


def searched_source(number: int, chunk: Chunk) -> dict[str, Any]:
    """Return the same of a passage that was searched and says nothing of the answer."""
    return {
        "number": number,
        "title": chunk.title or chunk.document_id,
        "place": place_of(chunk, chunk.id, chunk.title),
        "holds": False,
        "parts": [(chunk.text, False)],
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


def describe_place(citation: Citation) -> str:
    """Say where a cited chunk stands in its document."""
    page = page_name(citation.document_id, citation.page)
    return _described(citation.chunk, citation.heading, page, citation.title)


def _described(chunk: int, heading: str | None, page: str, title: str) -> str:
    """Name a chunk by page, heading and number. A heading that only repeats the title beside it is left out."""
    return " · ".join(filter(None, (page, heading if heading != title else "", f"chunk {chunk + 1}")))


def place_of(chunk: Chunk | None, chunk_id: str, title: str) -> str:
    """Say where a chunk stands in its document, as far as it is known.

    Args:
        chunk: The chunk; None if it is no longer stored.
        chunk_id: Its id.
        title: Title that is shown beside the place.
    """
    span, (document_id, _, ordinal) = chunk.span if chunk else None, chunk_id.rpartition("#")
    page = page_name(document_id, span.page if span else None)
    return _described(chunk.ordinal if chunk else int(ordinal), span.heading if span else None, page, title)


def describe_answer(answer: Answer, full_ms: float) -> str:
    """Say how sure an answer is and how long its first token took, beside the time without stored KV.

    Args:
        answer: The answer.
        full_ms: Estimated milliseconds with full recompute; 0 if unknown.
    """
    report = answer.report
    nothing = "" if answer.citations else "The passages that were found do not say. "
    if report.held == 0 and not report.abstained and not is_judgement(answer.answer):
        nothing = f"{NOT_HELD} "
    word = "" if report.confidence is None else describe_confidence(report.confidence)
    # A bare “likely” below `unknown` could be read as if the answer were known.
    sure = f"That this is right is {word}. " if word and nothing else f"{word.capitalize()}. " if word else ""
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


def describe_searched(answer: Answer) -> str:
    """Say how many passages of how many documents were searched for an answer."""
    chunks = answer.report.chunks
    documents = len({chunk.document_id for chunk in chunks})
    return f"Searched {quantity(len(chunks), 'passage')} of {quantity(documents, 'document')}."


def deciding_of(answer: Answer, passages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the sentence that decides `yes`, `no` or `unknown`, as answer.js shows it, or the one that comes closest.

    Args:
        answer: The answer.
        passages: Its passages, by `to_source` or `searched_source`.

    Returns:
        None where no sentence has a third of what the question asks, and for any other answer.
    """
    if not needs_search(answer):
        return None
    for passage in passages:
        if marked := [part for part, holds in passage["parts"] if holds]:
            return _sentence("This sentence decides:", passage, marked[0])
    sought, most, found = stems(answer.question), 1 / 3, None
    for passage in passages:
        text, title = "".join(part for part, _ in passage["parts"]), stems(passage["title"])
        for start, end in sentences(text):
            of_sentence = sought & stems(text[start:end])
            share = len(sought & (of_sentence | title)) / len(sought) if of_sentence else 0.0
            if share > most:
                most, found = share, _sentence("The closest sentence:", passage, text[start:end])
    return found


def _sentence(said: str, passage: dict[str, Any], text: str) -> dict[str, Any]:
    return {
        "said": said,
        "title": passage["title"],
        "place": passage["place"],
        "number": passage["number"],
        "text": " ".join(text.split()),
    }


def needs_search(answer: Answer) -> bool:
    """Whether the page says what was searched: where no passage says the answer in its words."""
    return is_unknown(answer.answer) or is_judgement(answer.answer) or answer.report.held == 0
