"""What the service returns, as frozen dataclasses. Unknown fields of a newer service are ignored.

Answers and reports are those of `ragkv.report`. All points in time are in Unix seconds.
"""

from __future__ import annotations

from typing import Any, TypedDict

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ragkv.passages import Citation
from ragkv.report import Answer, Ratios, Report
from ragkv.types import Filter


class AnswerOptions(TypedDict, total=False):
    """How an answer is made. The service's settings apply to what is left out.

    Attributes:
        top_k: Number of chunks to retrieve.
        method: Method that builds the context cache, with its parameters.
        prefill: Prefill policy.
        decode: Decode policy.
        max_tokens: Largest number of tokens of the answer.
        filter: Search only documents whose metadata matches.
        deadline_s: Seconds after which the question expires.
        answer_schema: JSON schema; the answer is JSON that follows it.
        abstain_below: The answer becomes `unknown` where its confidence is lower, 0 to 1.
        speculation: Whether tokens of the answer are drafted from its prompt.
    """

    top_k: int | None
    method: str | None
    prefill: str | None
    decode: str | None
    max_tokens: int | None
    filter: Filter | None
    deadline_s: float | None
    answer_schema: dict[str, Any] | None
    abstain_below: float | None
    speculation: bool | None


class Options(AnswerOptions, total=False):
    """Options of a question, as in `POST /v1/answers`.

    Attributes:
        collection: Collection to search.
        conversation_id: Conversation that the question continues or starts.
    """

    collection: str
    conversation_id: str | None


_IGNORE_EXTRA = ConfigDict(extra="ignore")


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Turn:
    """A turn of a conversation.

    Attributes:
        question: Text of the question.
        answer: Text of the answer.
        method: Method that the question was asked with.
        chunks: Ids of the chunks that the question added to the context.
        created: When the question was answered.
    """

    question: str
    answer: str
    method: str
    chunks: tuple[str, ...]
    created: float


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Conversation:
    """A conversation.

    Attributes:
        conversation_id: Id of the conversation.
        collection: Collection that it belongs to.
        turns: Its turns, in order.
    """

    conversation_id: str
    collection: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Brief:
    """Summary of a recorded answer.

    Attributes:
        id: Id of the request.
        when: When the question was asked.
        question: The first 200 characters of the question.
        collection: Collection that was searched.
        method: Method of the answer.
        ratios: Ratios of the report.
        ttft: Time to first token, in milliseconds.
        total: Total time, in milliseconds.
        full_ms: Estimated time to first token with full recompute, in milliseconds; 0 if unknown.
        origin: Where it was asked: `api`, or `page` for the dashboard.
        rating: What its user thinks of it: `up`, `down`, or empty.
    """

    id: str
    when: float
    question: str
    collection: str
    method: str
    ratios: Ratios
    ttft: float
    total: float
    full_ms: float
    origin: str = "api"
    rating: str = ""


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Briefs:
    """A page of recorded answers, newest first.

    Attributes:
        answers: Answers of this page.
        before: Value of `before` for the next page; None on the last page.
    """

    answers: tuple[Brief, ...]
    before: float | None


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Recalled:
    """A recorded answer with its report.

    Attributes:
        id: Id of the request.
        when: When the question was asked.
        collection: Collection that was searched.
        full_ms: Estimated time to first token with full recompute, in milliseconds; 0 if unknown.
        question: Text of the question.
        answer: Text of the answer.
        citations: Retrieved chunks.
        report: Report of the answer.
        origin: Where it was asked: `api`, or `page` for the dashboard.
        rating: What its user thinks of it: `up`, `down`, or empty.
    """

    id: str
    when: float
    collection: str
    full_ms: float
    question: str
    answer: str
    citations: tuple[Citation, ...]
    report: Report
    origin: str = "api"
    rating: str = ""


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class ChunkMap:
    """What an answer used of one chunk.

    Attributes:
        chunk_id: Id of the chunk.
        document_id: Id of its document.
        title: Title of the chunk.
        citation: Position among the citations of the answer, from 1; None if it is not cited.
        tokens: Number of tokens.
        states: For each layer one letter per block: k kept, r recomputed, p pulled back later, d dropped.
        texts: Texts of the blocks; None if the chunk no longer exists.
        holds_answer: Indices of the blocks that contain the text of the answer.
        recomputed: For each layer the recomputed share of each block's tokens; None if nothing was recomputed.
    """

    chunk_id: str
    document_id: str
    title: str
    citation: int | None
    tokens: int
    states: tuple[str, ...]
    texts: tuple[str, ...] | None
    holds_answer: tuple[int, ...]
    recomputed: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class AnswerMap:
    """The KV map of an answer.

    Attributes:
        block: Tokens of a block.
        layers: Number of layers.
        chunks: Maps of the chunks, in prompt order.
    """

    block: int
    layers: int
    chunks: tuple[ChunkMap, ...]


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Retrieved:
    """The first event of a streamed answer: retrieval and prefill are done.

    Attributes:
        citations: Retrieved chunks.
        timings_ms: Milliseconds of the steps so far, by name.
    """

    citations: tuple[Citation, ...]
    timings_ms: dict[str, float]


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Said:
    """The next piece of a streamed answer.

    Attributes:
        text: Text of the piece. All pieces joined are the answer.
    """

    text: str


@dataclass(frozen=True)
class Cited:
    """A citation of a streamed answer.

    Attributes:
        citation: The retrieved chunk.
    """

    citation: Citation


@dataclass(frozen=True)
class Reported:
    """The report of a streamed answer.

    Attributes:
        report: What the answer reused, loaded and recomputed.
    """

    report: Report


@dataclass(frozen=True)
class Done:
    """The last event of a streamed answer.

    Attributes:
        answer: The complete answer.
    """

    answer: Answer


Event = Retrieved | Said | Cited | Reported | Done
"""An event of a streamed answer. The kinds arrive in this order."""
