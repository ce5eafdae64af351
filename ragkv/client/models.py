"""What the service says, as frozen dataclasses. Fields that a later service adds are passed over.

An answer and its report are those of `ragkv.report`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ragkv.report import Answer, Citation, Ratios, Report
from ragkv.types import Filter


class Options(TypedDict, total=False):
    """How to answer a question; what is left out takes the service's settings. As in `POST /v1/answers`."""

    collection: str
    conversation_id: str | None
    top_k: int | None
    method: str | None
    prefill: str | None
    decode: str | None
    max_tokens: int | None
    filter: Filter | None
    deadline_s: float | None


LOOSE = ConfigDict(extra="ignore")


@dataclass(frozen=True, config=LOOSE)
class Document:
    """A document that answers are given from. kv_bytes: of its KV, as the model computes it · hash: of title, text and
    metadata · times: Unix seconds · bytes: of its text, None in a list · text: only where it was asked for."""

    id: str
    collection: str
    title: str
    metadata: dict[str, Any]
    chunks: int
    tokens: int
    kv_bytes: int
    hash: str
    created: float
    updated: float
    bytes: int | None = None
    text: str | None = None


@dataclass(frozen=True, config=LOOSE)
class Page:
    """Documents by id. after: what to ask with for the next ones; None where these are the last."""

    documents: tuple[Document, ...]
    after: str | None


@dataclass(frozen=True, config=LOOSE)
class JobError:
    """code: the kind of fault in snake case."""

    code: str
    message: str


@dataclass(frozen=True, config=LOOSE)
class JobDocument:
    """A document of a job."""

    id: str
    status: str
    error: JobError | None = None


@dataclass(frozen=True, config=LOOSE)
class JobCounts:
    """Documents of a job. done: all that no longer wait."""

    total: int
    done: int
    completed: int
    unchanged: int
    failed: int
    cancelled: int


@dataclass(frozen=True, config=LOOSE)
class Job:
    """stage, done, total: of the document being read · eta_seconds: None while it is not known · documents: those that
    failed, the first 20 of them · times: Unix seconds."""

    id: str
    collection: str
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    stage: str
    done: int
    total: int
    counts: JobCounts
    documents: tuple[JobDocument, ...]
    created: float
    updated: float
    eta_seconds: float | None = None
    error: JobError | None = None
    last_error: JobError | None = None
    started: float | None = None
    finished: float | None = None


@dataclass(frozen=True, config=LOOSE)
class Collection:
    """How much a collection holds."""

    name: str
    documents: int
    chunks: int
    tokens: int
    kv_bytes: int


@dataclass(frozen=True, config=LOOSE)
class Turn:
    """A turn of a conversation. chunks: ids of those that came with the question."""

    question: str
    answer: str
    method: str
    chunks: tuple[str, ...]
    created: float


@dataclass(frozen=True, config=LOOSE)
class Conversation:
    """A conversation, its turns in order."""

    conversation_id: str
    collection: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, config=LOOSE)
class Brief:
    """A remembered answer in a list. id: of its request · when: Unix seconds · question: its first 200 characters ·
    ttft, total: milliseconds · full_ms: to the first token, as full recompute is estimated to take; 0: unknown."""

    id: str
    when: float
    question: str
    collection: str
    method: str
    ratios: Ratios
    ttft: float
    total: float
    full_ms: float


@dataclass(frozen=True, config=LOOSE)
class Briefs:
    """Remembered answers, newest first. before: what to ask with for the next ones; None where these are the last."""

    answers: tuple[Brief, ...]
    before: float | None


@dataclass(frozen=True, config=LOOSE)
class Recalled:
    """A remembered answer, whole; see Brief."""

    id: str
    when: float
    collection: str
    full_ms: float
    question: str
    answer: str
    citations: tuple[Citation, ...]
    report: Report


@dataclass(frozen=True, config=LOOSE)
class ChunkMap:
    """What an answer read of one chunk. citation: its number among the answer's, from 1 · states: per layer a letter
    for each block, k kept, r recomputed, p pulled back later, d dropped · texts: of the blocks, None where the chunk is
    not there any more · holds_answer: blocks in which the answer stands · recomputed: per layer the share of each
    block's tokens that was computed again, None where none was."""

    chunk_id: str
    document_id: str
    title: str
    citation: int | None
    tokens: int
    states: tuple[str, ...]
    texts: tuple[str, ...] | None
    holds_answer: tuple[int, ...]
    recomputed: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, config=LOOSE)
class AnswerMap:
    """What an answer was read from, in prompt order. block: tokens of a block."""

    block: int
    layers: int
    chunks: tuple[ChunkMap, ...]


@dataclass(frozen=True, config=LOOSE)
class Retrieved:
    """The question was read: what the answer will be read from, and milliseconds of the steps so far."""

    citations: tuple[Citation, ...]
    timings_ms: dict[str, float]


@dataclass(frozen=True, config=LOOSE)
class Said:
    """More of the answer: texts of all of these make up the answer."""

    text: str


@dataclass(frozen=True)
class Cited:
    """A chunk that the answer was read from."""

    citation: Citation


@dataclass(frozen=True)
class Reported:
    """What the answer reused."""

    report: Report


@dataclass(frozen=True)
class Done:
    """The whole answer."""

    answer: Answer


Event = Retrieved | Said | Cited | Reported | Done
"""What a streamed answer consists of, in this order."""
