"""Server-sent events: sends an answer while it is decoded.

Nothing is sent before prefill is done, not even the status line, so that an error up to then gets its own status. A
later error ends the stream with an event that reports it.

A slow reader delays only its own request. The engine goes on, and the text that comes meanwhile is joined into one
piece (runtime/answer_channel.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.sse import format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragkv.api.errors import Fault, Gone, fault_of
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.runtime.request_context import current

SSE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store, no-cache", "X-Accel-Buffering": "no"}
"""Tell proxies not to store or buffer the stream."""


logger = logging.getLogger("ragkv.api")


def describe_events(description: str, example: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Describe an event stream for OpenAPI.

    Args:
        description: What the events mean.
        example: A part of a stream.
        names: Names of the events, if they have any.
    """
    event = {"event": {"enum": list(names)}} if names else {}
    item = {"type": "object", "required": ["data", *event], "properties": {"data": {"type": "string"}, **event}}
    return {"itemSchema": {"description": description, **item}, "example": example}


def encode_event(data: Any, name: str | None = None) -> bytes:
    """Encode one event with `data` as JSON."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return format_sse_event(data_str=text, event=name)


class EventStream(Response):
    """Sends events until they end or the client disconnects. Then it cancels the answer."""

    def __init__(self, stream: AnswerStream, events: AsyncIterator[bytes], media_type: str = SSE):
        super().__init__(headers=HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._stream, self._events = stream, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. The answer stream watches the connection and ends the events at a disconnect."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Gone:
            pass
        finally:
            self._stream.cancel()


def stream_fault(error: Exception) -> Fault:
    """Return the fault that ends a failed stream. Unexpected errors are logged, as the server does for responses."""
    fault = fault_of(error)
    current().fault = fault.code
    if fault.status == 500:
        logger.error("an answer failed while it was streamed", exc_info=error)
    return fault
