"""The form of a reply of OpenAI's chat completions, and the sources that Open WebUI reads from a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from ragkv.api.error_forms import openai_error
from ragkv.api.errors import Fault
from ragkv.api.routes.chat_exchange import ChatOutcome
from ragkv.api.routes.event_stream import SSE, encode_event
from ragkv.api.routes.log_probabilities import token_entries
from ragkv.engine.token_scores import TokenScore
from ragkv.passages import Citation


class CompletionForm:
    """The form of a chat completion (chat_exchange.ChatForm), whose parts share an id, a time and a model.

    Args:
        model: Model as the request named it.
        usage: Whether a stream ends with a chunk that holds the usage.
    """

    media_type = SSE

    def __init__(self, model: str, usage: bool):
        self._usage = usage
        self._identity = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, outcome: ChatOutcome) -> dict[str, Any]:
        """Build the response that is not streamed."""
        message = {"role": "assistant", "content": outcome.text, "refusal": None}
        logprobs = None if outcome.tokens is None else _logprobs(outcome.tokens)
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": outcome.finish_reason}
        content = {"choices": [choice], "usage": outcome.usage, **outcome.extension}
        return self._envelope("chat.completion") | content

    def first(self) -> Iterable[bytes]:
        """Encode the first chunk of a stream."""
        return (encode_event(self._chunk({"role": "assistant", "content": ""})),)

    def piece(self, text: str, tokens: Sequence[TokenScore] = ()) -> bytes:
        """Encode a chunk with the next piece of the answer."""
        return encode_event(self._chunk({"content": text}, tokens=tokens)) if text else KEEPALIVE_COMMENT

    def last(self, outcome: ChatOutcome) -> Iterable[bytes]:
        """Encode the last chunks: one for each cited document, the finish reason with citations and report, and the
        usage if it was requested."""
        for event in source_events(outcome.citations):
            yield encode_event(self._chunk({}) | {"event": event})
        yield encode_event(self._chunk({}, outcome.finish_reason) | outcome.extension)
        if self._usage:
            yield encode_event(self._envelope("chat.completion.chunk") | {"choices": [], "usage": outcome.usage})
        yield format_sse_event(data_str="[DONE]")

    def fault(self, fault: Fault) -> bytes:
        """Encode the event that reports a fault."""
        return encode_event(openai_error(fault))

    def _chunk(
        self, delta: dict[str, str], finish_reason: str | None = None, tokens: Sequence[TokenScore] = ()
    ) -> dict[str, Any]:
        logprobs = _logprobs(tokens) if tokens else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        no_usage_yet = {"usage": None} if self._usage else {}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]} | no_usage_yet

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"object": kind, **self._identity}


def _logprobs(tokens: Sequence[TokenScore]) -> dict[str, Any]:
    return {"content": token_entries(tokens), "refusal": None}


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
