"""The form of a reply of OpenAI's Responses API, and the events of its streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT

from ragkv.api.error_forms import openai_error
from ragkv.api.errors import Fault
from ragkv.api.routes.chat_exchange import ChatOutcome
from ragkv.api.routes.event_stream import SSE, encode_event
from ragkv.api.routes.log_probabilities import token_entries
from ragkv.api.schemas.openai_responses import ResponseRequest
from ragkv.engine.token_scores import TokenScore

EVENTS = (
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.annotation.added", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done", "response.completed", "response.incomplete", "error"),
)
"""Names of the events, in their order."""
_ITEM = {"output_index": 0}


def empty_response(id: str, model: str, created: float) -> dict[str, Any]:
    """Build a response that has no text yet, with the defaults of a request."""
    return {
        "id": id,
        "object": "response",
        "created_at": int(created),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def output_message(id: str, part: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    """Build the message of the assistant."""
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def output_text(
    text: str, annotations: list[dict[str, Any]], tokens: Sequence[TokenScore] | None = None
) -> dict[str, Any]:
    """Build the text of a message."""
    logprobs = token_entries(tokens or ())
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs}


class ResponseForm:
    """The form of a response (chat_exchange.ChatForm)."""

    media_type = SSE

    def __init__(self, body: ResponseRequest, id: str, stored: bool):
        """Set up one reply.

        Args:
            body: The request.
            id: Id of the response.
            stored: Whether a conversation keeps it.
        """
        self._empty = empty_response(id, body.model, time.time()) | {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "previous_response_id": body.previous_response_id,
            "store": stored,
            "temperature": body.temperature or 0.0,
            "text": {"format": body.form.model_dump(by_alias=True, exclude_defaults=True)},
            "tool_choice": body.tool_choice or "auto",
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
        }
        self._message_id, self._sent = f"msg_{uuid.uuid4().hex}", 0
        self._at = {"item_id": self._message_id, "content_index": 0, **_ITEM}

    def whole(self, outcome: ChatOutcome) -> dict[str, Any]:
        """Build the response that is not streamed."""
        part = output_text(outcome.text, annotations_of(outcome), outcome.tokens)
        ended: dict[str, Any] = {"status": "completed"}
        if outcome.at_limit:
            ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        message = output_message(self._message_id, part, ended["status"])
        return self._empty | ended | {"output": [message], "usage": _usage(outcome)} | outcome.extension

    def first(self) -> Iterable[bytes]:
        """Encode the events before the text."""
        message = {**output_message(self._message_id, {}, "in_progress"), "content": []}
        yield self._event("response.created", response=self._empty)
        yield self._event("response.in_progress", response=self._empty)
        yield self._event("response.output_item.added", **_ITEM, item=message)
        yield self._event("response.content_part.added", **self._at, part=output_text("", []))

    def piece(self, text: str, tokens: Sequence[TokenScore] = ()) -> bytes:
        """Encode the next piece of the text."""
        if not text:
            return KEEPALIVE_COMMENT
        return self._event("response.output_text.delta", **self._at, delta=text, logprobs=token_entries(tokens))

    def last(self, outcome: ChatOutcome) -> Iterable[bytes]:
        """Encode the citations and the events behind the text."""
        response = self.whole(outcome)
        (message,) = response["output"]
        (part,) = message["content"]
        for number, annotation in enumerate(part["annotations"]):
            given = {"annotation_index": number, "annotation": annotation}
            yield self._event("response.output_text.annotation.added", **self._at, **given)
        yield self._event("response.output_text.done", **self._at, text=outcome.text, logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._at, part=part)
        yield self._event("response.output_item.done", **_ITEM, item=message)
        yield self._event(f"response.{response['status']}", response=response)

    def fault(self, fault: Fault) -> bytes:
        """Encode the event that reports a fault, whose members clients read in either place."""
        error = openai_error(fault)
        return self._event("error", **{name: error["error"][name] for name in ("code", "message", "param")}, **error)

    def _event(self, name: str, **members: Any) -> bytes:
        event = encode_event({"type": name, "sequence_number": self._sent, **members}, name)
        self._sent += 1
        return event


def annotations_of(outcome: ChatOutcome) -> list[dict[str, Any]]:
    """Cite each document once: by its address if its id is one, else as a file."""
    titles = dict[str, str]()
    for citation in outcome.citations:
        titles.setdefault(citation.document_id, citation.title or citation.document_id)
    return [
        {"type": "url_citation", "url": id, "title": title, "start_index": 0, "end_index": len(outcome.text)}
        if id.startswith(("https://", "http://"))
        else {"type": "file_citation", "file_id": id, "filename": title, "index": number}
        for number, (id, title) in enumerate(titles.items())
    ]


def _usage(outcome: ChatOutcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": outcome.cached_tokens},
        "output_tokens": outcome.usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": outcome.usage["total_tokens"],
    }
