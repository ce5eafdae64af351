"""Conversion between Haystack's documents, answers, chunks and filters and those of a ragkv service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from haystack import Document, GeneratedAnswer
from haystack.dataclasses import ComponentInfo, StreamingChunk

from ragkv.client import Done, Event, Said
from ragkv.errors import ServiceError
from ragkv.integrations.connection import passage_metadata
from ragkv.integrations.filters import filter_of, unsupported
from ragkv.passages import Citation, FoundPassage
from ragkv.report import Answer
from ragkv.types import Filter


class AnswerPieces:
    """Converts the events of one streamed answer."""

    def __init__(self, info: ComponentInfo):
        """Start before the first event. info: the component that answers."""
        self._info, self._started = info, False
        self._answer: Answer | None = None

    def of(self, event: Event) -> Iterator[StreamingChunk]:
        """Yield the chunk of an event, if it has one."""
        if isinstance(event, Said):
            start, self._started = not self._started, True
            yield StreamingChunk(event.text, component_info=self._info, index=0, start=start)
        elif isinstance(event, Done):
            self._answer = event.answer
            report = event.answer.report
            reason: Any = report.decoding.ended
            yield StreamingChunk("", {"report": asdict(report)}, self._info, index=0, finish_reason=reason)

    def whole(self) -> Answer:
        """Return the whole answer.

        Raises:
            ServiceError: The stream ended without one.
        """
        if self._answer is None:
            raise ServiceError("the answer broke off")
        return self._answer


def document_of(passage: FoundPassage | Citation) -> Document:
    """Convert a passage."""
    meta = passage_metadata(passage)
    score = meta.pop("score")
    return Document(id=passage.chunk_id, content=passage.text, meta=meta, score=score)


def output_of(answer: Answer) -> dict[str, Any]:
    """Convert an answer to the output of a component."""
    documents = [document_of(citation) for citation in answer.citations]
    made = GeneratedAnswer(answer.answer, answer.question, documents, {"report": asdict(answer.report)})
    return {"answers": [made], "documents": documents}


def haystack_filter(filters: Mapping[str, Any] | None) -> Filter | None:
    """Convert a filter.

    Raises:
        InputError: It cannot be expressed.
    """
    return filter_of(_conditions(filters)) if filters else None


def _conditions(filters: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, operator, value) of a comparison, or of all that AND joins."""
    operator = filters.get("operator")
    if "field" in filters:
        yield str(filters["field"]).removeprefix("meta."), str(operator), filters.get("value")
    elif operator == "AND":
        for condition in filters.get("conditions", ()):
            yield from _conditions(condition)
    else:
        raise unsupported(f"the operator {operator!r}")
