"""Remembered answers as the edge shows them: a line in a list, whole, and the map of what they were read from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from api.runtime.answer_history import RecordedAnswer
from api.runtime.tenants import Tenant
from ragkv.engine.kv_map import ChunkKVMap
from ragkv.report import Citation, Ratios, Report

QUESTION_CHARS = 200
"""Of a question in a list."""

_BRIEF: dict[str, JsonValue] = {
    "id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "when": 1767225600.5,
    "question": "Who built the harbour of Tarn?",
    "collection": "default",
    "method": "scout",
    "ratios": {"sequence": 0.21, "recompute": 0.17, "load": 0.28, "cache_hit": 1.0},
    "ttft": 180.2,
    "total": 260.9,
    "full_ms": 850.0,
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
    """An answer in a list. id: of its request · when: Unix seconds · question: its first 200 characters · ttft, total:
    milliseconds · full_ms: to the first token, as full recompute is estimated to take; 0: unknown."""

    model_config = ConfigDict(json_schema_extra={"examples": [_BRIEF]})

    id: str
    when: float
    question: str
    collection: str
    method: str
    ratios: Ratios
    ttft: float
    total: float
    full_ms: float


class AnswerSummariesOut(BaseModel):
    """Answers, newest first. before: what to ask with for the next ones; null where these are the last."""

    answers: list[AnswerSummaryOut]
    before: float | None


class AnswerOut(BaseModel):
    """An answer as it was given, and of which request, when, and in which collection."""

    id: str
    when: float
    collection: str
    full_ms: float
    question: str
    answer: str
    citations: list[Citation]
    report: Report


class ChunkMapOut(BaseModel):
    """What an answer read of one chunk. citation: its number among the answer's citations, from 1; null where it is of
    an earlier turn · states: per layer a letter for each block: k kept, r recomputed, p pulled back while the answer
    was decoded, d dropped · recomputed: per layer the share of each block's tokens that was computed again; left out
    where none was · texts: of the blocks, together the chunk's piece of the prompt; null where it is not there any more
    · holds_answer: blocks in which the answer, or a part of one that runs across several, stands."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CHUNK]})

    chunk_id: str
    document_id: str
    title: str
    citation: int | None
    tokens: int
    states: list[str]
    recomputed: list[list[float]] | None = None
    texts: list[str] | None
    holds_answer: list[int]


class AnswerMapOut(BaseModel):
    """What an answer was read from, in prompt order. block: tokens of a block."""

    block: int
    layers: int
    chunks: list[ChunkMapOut]


def brief(answered: RecordedAnswer, tenant: Tenant) -> dict[str, Any]:
    """A Brief."""
    report = answered.answer.report
    return {
        "id": answered.id,
        "when": answered.when,
        "question": answered.answer.question[:QUESTION_CHARS],
        "collection": tenant.outside(answered.collection),
        "method": report.method,
        "ratios": dataclasses.asdict(report.ratios),
        "ttft": report.timings_ms.ttft,
        "total": report.timings_ms.total,
        "full_ms": answered.full_ms,
    }


def recalled(answered: RecordedAnswer, tenant: Tenant) -> dict[str, Any]:
    """A Recalled."""
    about = {
        "id": answered.id,
        "when": answered.when,
        "collection": tenant.outside(answered.collection),
        "full_ms": answered.full_ms,
    }
    return about | dataclasses.asdict(answered.answer)


def drawn(answered: RecordedAnswer, texts: Sequence[list[str] | None]) -> dict[str, Any]:
    """An AnswerMap. texts: of the blocks of each chunk."""
    numbers = {cited.chunk_id: number for number, cited in enumerate(answered.answer.citations, start=1)}
    chunks = [
        _chunk(chunk, numbers.get(chunk.chunk_id), said, answered.answer.answer)
        for chunk, said in zip(answered.map.chunks, texts, strict=True)
    ]
    return {"block": answered.map.block, "layers": answered.map.layers, "chunks": chunks}


def _chunk(chunk: ChunkKVMap, citation: int | None, texts: list[str] | None, answer: str) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "chunk_id": chunk.chunk_id,
        "document_id": chunk.document_id,
        "title": chunk.title,
        "citation": citation,
        "tokens": chunk.tokens,
        "states": chunk.states,
        "texts": texts,
        "holds_answer": holding(texts or [], answer),
    }
    if any("r" in layer for layer in chunk.states):
        shown["recomputed"] = [[round(share, 4) for share in layer] for layer in chunk.shares]
    return shown


def holding(texts: Sequence[str], answer: str) -> list[int]:
    """Numbers of the blocks in which the answer stands, whole or in part, as words of their own, in any case."""
    words = answer.strip(" \t\n.,;:!?\"'").split()
    if not words:
        return []
    pattern = re.compile(r"(?<!\w)" + r"\s+".join(map(re.escape, words)) + r"(?!\w)", re.IGNORECASE)
    spans = [found.span() for found in pattern.finditer("".join(texts))]
    holds, start = list[int](), 0
    for number, text in enumerate(texts):
        end = start + len(text)
        if any(first < end and start < last for first, last in spans):
            holds.append(number)
        start = end
    return holds
