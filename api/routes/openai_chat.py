"""Conversion between OpenAI's chat completions and the questions and answers of this service.

The question is what the user said last. The messages before it keep their roles: each earlier question stands with its
answer as a turn of its own before the question, behind the chunks. System messages, wherever they stand, are
instructions before the first turn. A last message of the assistant is how the answer begins. Calls of tools and their
results are not read.
What is searched for when the question refers to an earlier one is decided by retrieval (ragkv/retrieval/follow_up.py).
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ragkv.api.schemas.openai import MAX_TOKENS, NO_LIMIT, Chat
from ragkv.errors import InputError, NotFound
from ragkv.passages import Citation
from ragkv.report import Answer
from ragkv.types import AskOptions

MIN_TEMPERATURE = 1e-3
"""Lower temperatures count as 0. They would sample the same tokens, and their logits would overflow."""


NO_USAGE = {
    "prompt_tokens": 0,
    "completion_tokens": 0,
    "total_tokens": 0,
    "prompt_tokens_details": {"cached_tokens": 0},
}


@dataclass(frozen=True)
class ChatTurns:
    """The messages of a request, as the service reads them.

    Attributes:
        question: What the user said last.
        history: Earlier (question, answer). What a user wrote without getting an answer belongs to the next question.
        instructions: The system messages.
        beginning: The last message, where it is the assistant's: how the answer begins.
    """

    question: str
    history: tuple[tuple[str, str], ...] = ()
    instructions: str = ""
    beginning: str = ""


def turns_of(chat: Chat) -> ChatTurns:
    """Read the messages, as the module describes."""
    asked, said, history, instructions = list[str](), list[str](), list[tuple[str, str]](), list[str]()
    for message in chat.messages:
        text = message.text.strip()
        if not text:
            continue
        if message.role == "user":
            if said:
                history.append(("\n".join(asked), "\n".join(said)))
                asked, said = [], []
            asked.append(text)
        elif message.role != "assistant":
            instructions.append(text)
        elif asked:
            said.append(text)
    last = chat.messages[-1]
    beginning = last.text.lstrip() if last.role == "assistant" else ""
    return ChatTurns("\n".join(asked), tuple(history), "\n".join(instructions), beginning)


def id_of(name: str) -> str:
    """Return a model's name as clients can write it anywhere, in lists and addresses: without blanks."""
    return "-".join(name.replace("+", " ").split())


def method_of(chat: Chat, model: str) -> str | None:
    """Return the method that the request names; None for the default of the service.

    Args:
        chat: The request.
        model: Name of the loaded model; its id names it, too.

    Raises:
        NotFound: The request names another model.
        InputError: The request names two different methods.
    """
    suffixes = [chat.model.removeprefix(name) for name in (model, id_of(model)) if chat.model.startswith(name)]
    suffix = next((suffix for suffix in suffixes if not suffix or suffix.startswith(":")), None)
    if suffix is None:
        raise NotFound(f"there is no such model; use {id_of(model)!r}, or see /v1/models")
    from_model, from_extension = suffix.removeprefix(":"), chat.ragkv.method
    if from_model and from_extension and from_model != from_extension:
        raise InputError("model and ragkv.method name two methods; give one")
    return from_model or from_extension


def options_of(chat: Chat, turns: ChatTurns, method: str | None, collection: str) -> AskOptions:
    """Convert a request to AskOptions.

    Args:
        chat: The request.
        turns: Result of `turns_of`.
        method: Result of `method_of`.
        collection: Name of the collection in the catalogue.
    """
    temperature = chat.temperature or 0.0
    if temperature < MIN_TEMPERATURE or chat.top_p == 0:
        temperature = 0.0
    stop = (chat.stop,) if isinstance(chat.stop, str) else (chat.stop or ())
    return replace(
        chat.ragkv.options(collection),
        history=turns.history,
        instructions=turns.instructions,
        beginning=turns.beginning.rstrip(),
        method=method,
        max_tokens=_longest(chat.max_completion_tokens or chat.max_tokens),
        temperature=temperature,
        top_p=chat.top_p or 1.0,
        presence_penalty=chat.presence_penalty or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        stop=tuple(text for text in stop if text),
        seed=secrets.randbits(63) if chat.seed is None else chat.seed,
    )


def _longest(asked: int | None) -> int | None:
    return None if asked in (None, NO_LIMIT) else min(asked, MAX_TOKENS)


async def continued(pieces: AsyncIterator[str], beginning: str) -> AsyncIterator[str]:
    """Yield the pieces of an answer as `behind` returns the whole."""
    said, shown = "", 0
    async for piece in pieces:
        said += piece
        text = "" if beginning.startswith(said) else behind(said, beginning)
        yield text[shown:]
        shown = len(text)


def behind(answer: str, beginning: str) -> str:
    """Return what an answer says behind its beginning, which the client has; the whole of one that begins otherwise."""
    rest = answer.removeprefix(beginning.rstrip())
    return rest.lstrip() if beginning[-1:].isspace() else rest


@dataclass(frozen=True)
class ChatReply:
    """Builds the parts of one response, which share an id, a time and a model.

    Attributes:
        model: Model as the request named it.
        usage: Whether the stream ends with a chunk that holds the usage.
        beginning: How the answer begins, which the client has.
        id: Id of the response.
        created: Unix seconds.
    """

    model: str
    usage: bool = False
    beginning: str = ""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, answer: Answer) -> dict[str, Any]:
        """Build the response that is not streamed."""
        message = {"role": "assistant", "content": behind(answer.answer, self.beginning), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.report.decoding.ended}
        content = {"choices": [choice], "usage": usage_of(answer), "ragkv": extension_of(answer)}
        return self._envelope("chat.completion") | content

    def first(self) -> dict[str, Any]:
        """Build the first chunk of a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, Any]:
        """Build a chunk with the next piece of the answer."""
        return self._chunk({"content": text})

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Build the last chunks: a chunk for each cited document, the finish reason with citations and report, and
        the usage if it was requested."""
        sources = [self._chunk({}) | {"event": event} for event in source_events(answer.citations)]
        end = self._chunk({}, answer.report.decoding.ended) | {"ragkv": extension_of(answer)}
        return [*sources, end, *self._last_usage(usage_of(answer))]

    def told(self, text: str) -> dict[str, Any]:
        """Build the response, not streamed, with a text that is no answer from documents."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return self._envelope("chat.completion") | {"choices": [choice], "usage": NO_USAGE}

    def told_in_chunks(self, text: str) -> list[dict[str, Any]]:
        """Build the stream with a text that is no answer from documents."""
        return [self.first(), self.piece(text), self._chunk({}, "stop"), *self._last_usage(NO_USAGE)]

    def _last_usage(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage}] if self.usage else []

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        no_usage_yet = {"usage": None} if self.usage else {}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]} | no_usage_yet

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def source_events(citations: Sequence[Citation]) -> list[dict[str, Any]]:
    """Build an event for each cited document, as Open WebUI reads them from a stream and shows them as sources.

    Other programs ignore the member `event` of a chunk.
    """
    documents: dict[str, list[Citation]] = {}
    for citation in citations:
        documents.setdefault(citation.document_id, []).append(citation)
    return [{"type": "source", "data": _source(id, cited)} for id, cited in documents.items()]


def _source(id: str, cited: Sequence[Citation]) -> dict[str, Any]:
    """Build a source: a document with its cited passages. Pages count from 0 there."""
    link = {"url": id} if id.startswith(("https://", "http://")) else {}
    places = [{} if each.page is None else {"page": each.page - 1} for each in cited]
    return {
        "source": {"id": id, "name": cited[0].title or id, **link},
        "document": [each.text for each in cited],
        "metadata": [{"source": id, "name": each.title or id, **at} for each, at in zip(cited, places, strict=True)],
    }


def extension_of(answer: Answer) -> dict[str, Any]:
    """Build the `ragkv` member of a response: citations and report."""
    return {"citations": [asdict(citation) for citation in answer.citations], "report": asdict(answer.report)}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Count tokens as OpenAI does (schemas/openai.py, Usage)."""
    tokens, missed = answer.report.tokens, {fallback.chunk_id for fallback in answer.report.cache.fallbacks}
    cached = sum(each.tokens - each.recomputed_tokens for each in answer.report.chunks if each.chunk_id not in missed)
    prompt = tokens.context + tokens.question
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": int(cached)},
    }
