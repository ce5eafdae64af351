"""`/v1/completions`: OpenAI's older API, in which a prompt has no messages."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import Response

from ragkv.api.error_forms import openai_error
from ragkv.api.errors import Fault
from ragkv.api.routes.chat_exchange import ChatExchangeDep, ChatOutcome
from ragkv.api.routes.event_stream import SSE, describe_events, encode_event
from ragkv.api.routes.log_probabilities import TokenLists
from ragkv.api.routes.openai import ERRORS
from ragkv.api.schemas.openai_completions import CompletionRequest, TextCompletion
from ragkv.engine.token_scores import TokenScore

router = APIRouter()

_EXAMPLE = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"text":"Ada","index":0,'
    '"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
_CHUNKS = describe_events("A chunk, as JSON; the last one is `[DONE]`.", _EXAMPLE)


@router.post(
    "/v1/completions",
    response_model=TextCompletion,
    responses={**ERRORS, 200: {"description": "The completion", "content": {SSE: _CHUNKS}}},
)
async def completions(body: CompletionRequest, exchange: ChatExchangeDep) -> Response:
    """Answer a prompt from the documents of a collection. The prompt is a text or a list of one.

    `ragkv` in the request and in the response is as in `POST /v1/chat/completions`; in a stream it is in the chunk with
    `finish_reason`. `suffix`, `echo` and several choices are refused.
    """
    return await exchange.respond(body.chat(), _PromptForm(body.model, body.with_usage))


class _PromptForm:
    """The form of a completion (chat_exchange.ChatForm).

    Args:
        model: As the request named it.
        usage: Whether a stream ends with a chunk that holds the usage.
    """

    media_type = SSE

    def __init__(self, model: str, usage: bool):
        self._usage, self._lists = usage, TokenLists()
        self._envelope = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, outcome: ChatOutcome) -> dict[str, Any]:
        """Build the completion that is not streamed."""
        whole = self._chunk(outcome.text, outcome.finish_reason, outcome.tokens)
        return whole | {"usage": outcome.usage} | outcome.extension

    def first(self) -> Iterable[bytes]:
        """Return nothing: a stream begins with its first piece."""
        return ()

    def piece(self, text: str, tokens: Sequence[TokenScore] = ()) -> bytes:
        """Encode the next piece."""
        chunk = self._chunk(text, tokens=tokens or None)
        return encode_event(chunk | self._no_usage_yet) if text else KEEPALIVE_COMMENT

    def last(self, outcome: ChatOutcome) -> Iterable[bytes]:
        """Encode the reason of the end with citations and report, and the usage if it was requested."""
        yield encode_event(self._chunk("", outcome.finish_reason) | self._no_usage_yet | outcome.extension)
        if self._usage:
            yield encode_event(self._envelope | {"choices": [], "usage": outcome.usage})
        yield format_sse_event(data_str="[DONE]")

    def fault(self, fault: Fault) -> bytes:
        """Encode the event that reports a fault."""
        return encode_event(openai_error(fault))

    @property
    def _no_usage_yet(self) -> dict[str, None]:
        return {"usage": None} if self._usage else {}

    def _chunk(
        self, text: str, finish_reason: str | None = None, tokens: Sequence[TokenScore] | None = None
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else self._lists.of(tokens)
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope | {"choices": [choice]}
