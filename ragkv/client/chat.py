"""OpenAI's chat completions for both clients: what `chat` takes and returns, and how a stream is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import httpx2
from pydantic import TypeAdapter

from ragkv.client.models import AnswerOptions, Said
from ragkv.client.responses import parse_problem, parser, unexpected, validate
from ragkv.passages import Citation
from ragkv.report import Report

SAMPLING = ("temperature", "top_p", "seed", "stop", "max_tokens")
"""Options that OpenAI's API has, too. All others are members of `ragkv` in the request."""


class ChatMessage(TypedDict):
    """A message of a chat.

    Attributes:
        role: Who wrote it.
        content: Its text.
    """

    role: Literal["system", "user", "assistant"]
    content: str


class ChatOptions(AnswerOptions, total=False):
    """Options of a chat, as in `POST /v1/chat/completions`.

    Attributes:
        temperature: 0, the default, takes the likeliest token.
        top_p: Share of the probability that is sampled from.
        seed: Seed of the sampling.
        stop: Strings at which the answer ends, four at most.
        collection: Collection to search.
    """

    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: Sequence[str] | None
    collection: str | None


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of a chat, as OpenAI counts them.

    Attributes:
        prompt: Tokens of the retrieved chunks and the question.
        completion: Tokens of the answer.
        cached: Tokens of chunks whose stored KV was used.
    """

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True)
class ChatAnswer:
    """The answer to a chat.

    Attributes:
        id: Id of the completion.
        model: Model as the request named it.
        text: Text of the answer.
        finish_reason: `stop`, or `length` if the answer reached its longest length.
        usage: Token counts.
        citations: The retrieved chunks, with marks where the answer occurs.
        report: What the answer reused, loaded and recomputed.
    """

    id: str
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: TokenUsage
    citations: tuple[Citation, ...]
    report: Report


def chat_body(model: str, messages: Sequence[ChatMessage], stream: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Build the body of a request. Options that are None are left out."""
    given = {name: value for name, value in options.items() if value is not None}
    body: dict[str, Any] = {"model": model, "messages": [dict(message) for message in messages]}
    body |= {name: given.pop(name) for name in SAMPLING if name in given}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | ({"ragkv": given} if given else {})


class ChatParser:
    """Turns the chunks of one stream into the pieces of an answer and, at the end, the whole of it."""

    def __init__(self) -> None:
        """Start with an empty answer."""
        self._text = ""
        self._end: _Completion | None = None

    def parse(self, event: httpx2.ServerSentEvent) -> Said | ChatAnswer | None:
        """Parse an event; return None for one that says nothing new.

        Raises:
            Refused: The answer broke off, or this is not the stream of a ragkv service.
        """
        if event.data == "[DONE]":
            return None
        data = event.json()
        if isinstance(data, dict) and "error" in data:
            raise parse_problem(event.data, 500, "the answer broke off", None)
        chunk = validate(_COMPLETION, data)
        if self._end is not None:  # what follows the finish reason is the usage
            return _answer(self._end, self._text, chunk.usage)
        if chunk.ragkv is not None:
            self._end = chunk
        piece = "".join(choice.delta.content or "" for choice in chunk.choices)
        self._text += piece
        return Said(piece) if piece else None


@dataclass(frozen=True)
class _Text:
    content: str | None = None


@dataclass(frozen=True)
class _Choice:
    finish_reason: Literal["stop", "length"] | None = None
    message: _Text = _Text()
    delta: _Text = _Text()


@dataclass(frozen=True)
class _Details:
    cached_tokens: int


@dataclass(frozen=True)
class _Usage:
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details


@dataclass(frozen=True)
class _Grounds:
    citations: tuple[Citation, ...]
    report: Report


@dataclass(frozen=True)
class _Completion:
    """A completion, or a chunk of one."""

    id: str
    model: str
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    ragkv: _Grounds | None = None


@dataclass(frozen=True)
class _Model:
    id: str


@dataclass(frozen=True)
class _Models:
    data: tuple[_Model, ...]


_COMPLETION = TypeAdapter(_Completion)
_parse_whole, _parse_list = parser(_Completion), parser(_Models)


def parse_completion(response: httpx2.Response) -> ChatAnswer:
    """Parse a response that is not streamed."""
    found = _parse_whole(response)
    return _answer(found, "".join(choice.message.content or "" for choice in found.choices), found.usage)


def parse_models(response: httpx2.Response) -> tuple[str, ...]:
    """Parse the list of models."""
    return tuple(model.id for model in _parse_list(response).data)


def _answer(found: _Completion, text: str, usage: _Usage | None) -> ChatAnswer:
    reason = found.choices[0].finish_reason if found.choices else None
    if reason is None or usage is None or found.ragkv is None:
        raise unexpected("a completion without its end")
    counts = TokenUsage(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens)
    return ChatAnswer(found.id, found.model, text, reason, counts, found.ragkv.citations, found.ragkv.report)
