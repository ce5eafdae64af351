"""`/v1/messages`: Anthropic's API with retrieval built in, and Anthropic's errors."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ragkv.api.error_forms import anthropic_error
from ragkv.api.errors import Fault
from ragkv.api.routes.chat_exchange import ChatExchangeDep, ChatOutcome
from ragkv.api.routes.dependencies import errors_as
from ragkv.api.routes.event_stream import SSE, describe_events, encode_event
from ragkv.api.routes.openai_chat import ChatTurns, method_of, turns_of
from ragkv.api.runtime.request_context import current
from ragkv.api.schemas.anthropic import (
    AnthropicError,
    MessageReply,
    MessageRequest,
    TokenCount,
    TokenCountRequest,
)
from ragkv.engine.engine import Engine
from ragkv.engine.token_scores import TokenScore

router = APIRouter()

_ERRORS = errors_as(AnthropicError, 400, 401, 403, 404, 409, 413, 414, 415, 429, 431, 503, 504)
_NAMES = (
    *("message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop", "error"),
)
_EXAMPLE = (
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    '"text":"Ada"}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)
_EVENTS = describe_events("An event of Anthropic's streams, as JSON.", _EXAMPLE, _NAMES)


@router.post(
    "/v1/messages",
    response_model=MessageReply,
    responses={**_ERRORS, 200: {"description": "The message", "content": {SSE: _EVENTS}}},
)
async def messages(body: MessageRequest, exchange: ChatExchangeDep, beta: bool | None = None) -> Response:
    """Answer what the user said last from the documents of a collection, as Anthropic's API creates a message.

    The text block of the answer cites the passages that it was read from, as search results. `ragkv` in the response
    holds citations and report, in a stream in the event `message_delta`. `ragkv` in the request names collection and
    method, as in `POST /v1/chat/completions`; histories are read as there. The key comes as `x-api-key` or as a bearer.
    Images and documents in a message are refused, tools are never called. `beta` is accepted and changes nothing.
    """
    return await exchange.respond(body.chat(), _MessageForm(body.model))


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=_ERRORS)
async def count_tokens(body: TokenCountRequest, exchange: ChatExchangeDep, beta: bool | None = None) -> Response:
    """Count the tokens of messages, without those of the chunks that an answer retrieves.

    Tools count nothing, because they are not read. `beta` is accepted and changes nothing.
    """
    chat = body.chat()
    method_of(chat, exchange.engine_thread.model)  # raises for a model that is not there
    turns = turns_of(chat)
    counting = exchange.engine_thread.submit(lambda engine: _count(engine, turns), tenant=exchange.tenant.name)
    return JSONResponse({"input_tokens": await asyncio.wrap_future(counting)})


def _count(engine: Engine, turns: ChatTurns) -> int:
    prompt = engine.model.prompt
    beginning = prompt.answer(turns.beginning.rstrip()) if turns.beginning else ()
    return len(prompt.question(turns.question, turns.history, turns.instructions)) + len(beginning)


class _MessageForm:
    """The form of a message (chat_exchange.ChatForm).

    Args:
        model: As the request named it.
    """

    media_type = SSE

    def __init__(self, model: str):
        self._model, self._id = model, f"msg_{uuid.uuid4().hex}"

    def whole(self, outcome: ChatOutcome) -> dict[str, Any]:
        """Build the message that is not streamed."""
        block = {"type": "text", "text": outcome.text, "citations": _citations(outcome) or None}
        ended = {"stop_reason": _stop_reason(outcome), "stop_sequence": None, "usage": _usage(outcome)}
        return self._message([block]) | ended | outcome.extension

    def first(self) -> Iterable[bytes]:
        """Encode the events before the text. How many tokens were read is told at the end."""
        usage = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        block = {"type": "text", "text": "", "citations": None}
        return (
            _event("message_start", message=message),
            _event("content_block_start", index=0, content_block=block),
        )

    def piece(self, text: str, tokens: Sequence[TokenScore] = ()) -> bytes:
        """Encode the next piece of the text."""
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text}) if text else _PING

    def last(self, outcome: ChatOutcome) -> Iterable[bytes]:
        """Encode the citations and the events behind the text."""
        for citation in _citations(outcome):
            yield _event("content_block_delta", index=0, delta={"type": "citations_delta", "citation": citation})
        yield _event("content_block_stop", index=0)
        delta = {"stop_reason": _stop_reason(outcome), "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=_usage(outcome), **outcome.extension)
        yield _event("message_stop")

    def fault(self, fault: Fault) -> bytes:
        """Encode the event that reports a fault."""
        return encode_event(anthropic_error(fault, current().id), "error")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}


def _event(name: str, **members: Any) -> bytes:
    return encode_event({"type": name, **members}, name)


_PING = _event("ping")


def _stop_reason(outcome: ChatOutcome) -> str:
    return "max_tokens" if outcome.at_limit else "end_turn"


def _usage(outcome: ChatOutcome) -> dict[str, int]:
    """Count tokens as Anthropic does: those that were cached stand apart."""
    cached = outcome.cached_tokens
    return {
        "input_tokens": outcome.usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": outcome.usage["completion_tokens"],
    }


def _citations(outcome: ChatOutcome) -> list[dict[str, Any]]:
    return [
        {
            "type": "search_result_location",
            "cited_text": citation.text,
            "search_result_index": number,
            "source": citation.document_id,
            "title": citation.title or None,
            "start_block_index": 0,
            "end_block_index": 1,
        }
        for number, citation in enumerate(outcome.citations)
    ]
