"""Bodies of the HTTP API about recorded answers: the summary in a list, the answer, and the map of its blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from ragkv.api.runtime.answer_history import Rating, RecordedAnswer
from ragkv.api.runtime.request_context import Origin
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.common import DESCRIBED
from ragkv.engine.kv_map import ChunkKVMap
from ragkv.engine.occurrences import occurrences
from ragkv.passages import Citation
from ragkv.report import Ratios, Report

QUESTION_CHARS = 200
"""Characters of a question that a list shows."""

_SUMMARY: dict[str, JsonValue] = {
    "id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "when": 1767225600.5,
    "question": "Who built the harbour of Tarn?",
    "collection": "default",
    "method": "scout",
    "ratios": {"sequence": 0.21, "recompute": 0.17, "load": 0.28, "cache_hit": 1.0},
    "ttft": 180.2,
    "total": 260.9,
    "full_ms": 850.0,
    "origin": "api",
    "rating": "up",
}
_CHUNK: dict[str, JsonValue] = {
    "chunk_id": "tarn#0",
    "document_id": "tarn",
    "title": "Tarn",
    "citation": 1,
    "tokens": 21,
    "states": ["rd", "rd"],
    "recomputed": [[1.0, 0.0], [1.0, 0.0]],
    "texts": ["Document: Tarn\nThe harbour of Tarn was built in 1889 by Ada", " Brook.\n"],
    "holds_answer": [0, 1],
}


class AnswerSummaryOut(BaseModel):
    """An answer in a list."""

    model_config = DESCRIBED | ConfigDict(json_schema_extra={"examples": [_SUMMARY]})

    id: str
    """Id of the request."""
    when: float
    """Unix seconds."""
    question: str
    """The first 200 characters."""
    collection: str
    method: str
    ratios: Ratios
    ttft: float
    """Milliseconds."""
    total: float
    """Milliseconds."""
    full_ms: float
    """Estimated milliseconds to the first token with full recompute; 0 if unknown."""
    origin: Origin
    """`page` if it was asked on the dashboard."""
    rating: Rating
    """What its user thinks of it: `up`, `down`, or empty."""


class AnswerSummariesOut(BaseModel):
    """Answers, newest first."""

    model_config = DESCRIBED

    answers: list[AnswerSummaryOut]
    before: float | None
    """Value of the parameter `before` for the next page; null on the last page."""


class AnswerOut(BaseModel):
    """A recorded answer."""

    model_config = DESCRIBED

    id: str
    """Id of the request."""
    when: float
    """Unix seconds."""
    collection: str
    full_ms: float
    """Estimated milliseconds to the first token with full recompute; 0 if unknown."""
    origin: Origin
    """`page` if it was asked on the dashboard."""
    rating: Rating
    """What its user thinks of it: `up`, `down`, or empty."""
    question: str
    answer: str
    citations: list[Citation]
    report: Report


class ChunkMapOut(BaseModel):
    """The blocks of one chunk that an answer was read from."""

    model_config = DESCRIBED | ConfigDict(json_schema_extra={"examples": [_CHUNK]})

    chunk_id: str
    document_id: str
    title: str
    citation: int | None
    """Number among the citations of the answer, from 1; null if the chunk is of an earlier turn or nothing is cited."""
    tokens: int
    states: list[str]
    """One string per layer, one letter per block: k kept, r recomputed, p pulled in during decode, d dropped."""
    recomputed: list[list[float]] | None = None
    """Per layer the share of each block's tokens that was recomputed. Left out if there is none."""
    texts: list[str] | None
    """Text of each block; together they are the chunk's part of the prompt. Null if the chunk no longer exists."""
    holds_answer: list[int]
    """Blocks that contain the answer, or a part of it if it spans several blocks."""


class AnswerMapOut(BaseModel):
    """The blocks that an answer was read from, in prompt order."""

    model_config = DESCRIBED

    block: int
    """Tokens of a block."""
    layers: int
    chunks: list[ChunkMapOut]


def to_answer_summary(recorded: RecordedAnswer, tenant: Tenant) -> dict[str, Any]:
    """Convert to AnswerSummaryOut."""
    report = recorded.answer.report
    return {
        "id": recorded.id,
        "when": recorded.when,
        "question": recorded.answer.question[:QUESTION_CHARS],
        "collection": tenant.outside(recorded.collection),
        "method": report.method,
        "ratios": dataclasses.asdict(report.ratios),
        "ttft": report.timings_ms.ttft,
        "total": report.timings_ms.total,
        "full_ms": recorded.full_ms,
        "origin": recorded.origin,
        "rating": recorded.rating,
    }


def to_answer(recorded: RecordedAnswer, tenant: Tenant) -> dict[str, Any]:
    """Convert to AnswerOut."""
    head = {
        "id": recorded.id,
        "when": recorded.when,
        "collection": tenant.outside(recorded.collection),
        "full_ms": recorded.full_ms,
        "origin": recorded.origin,
        "rating": recorded.rating,
    }
    return head | dataclasses.asdict(recorded.answer)


def to_answer_map(recorded: RecordedAnswer, texts: Sequence[list[str] | None]) -> dict[str, Any]:
    """Convert to AnswerMapOut.

    Args:
        recorded: The answer.
        texts: Texts of the blocks of each chunk; None for a chunk that no longer exists.
    """
    numbers = {citation.chunk_id: number for number, citation in enumerate(recorded.answer.citations, start=1)}
    chunks = [
        _chunk(chunk, numbers.get(chunk.chunk_id), blocks, recorded.answer.answer)
        for chunk, blocks in zip(recorded.map.chunks, texts, strict=True)
    ]
    return {"block": recorded.map.block, "layers": recorded.map.layers, "chunks": chunks}


def _chunk(chunk: ChunkKVMap, citation: int | None, texts: list[str] | None, answer: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "chunk_id": chunk.chunk_id,
        "document_id": chunk.document_id,
        "title": chunk.title,
        "citation": citation,
        "tokens": chunk.tokens,
        "states": chunk.states,
        "texts": texts,
        "holds_answer": blocks_with_answer(texts or [], answer),
    }
    if any("r" in layer for layer in chunk.states):
        content["recomputed"] = [[round(share, 4) for share in layer] for layer in chunk.shares]
    return content


def blocks_with_answer(texts: Sequence[str], answer: str) -> list[int]:
    """Return the numbers of the blocks that contain the answer or a part of it, as whole words, ignoring case."""
    words = answer.strip(" \t\n.,;:!?\"'").split()
    if not words:
        return []
    spans = occurrences("".join(texts), words)
    numbers, start = list[int](), 0
    for number, text in enumerate(texts):
        end = start + len(text)
        if any(first < end and start < last for first, last in spans):
            numbers.append(number)
        start = end
    return numbers
