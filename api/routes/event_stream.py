"""Stream: an answer as server-sent events, while it is decoded.

Nothing is sent, the status line included, before the question was read or refused: until then a fault has its own
status. What goes wrong later ends the stream with an event that says so.

A reader that is slow is waited for, by its own request alone: meanwhile the text comes together in one piece
(progress.py), and the engine goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.sse import format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import Fault, Gone, fault_of
from api.runtime.answer_stream import AnswerStream
from api.runtime.request_context import current

HEADERS = {"Cache-Control": "no-store, no-cache", "X-Accel-Buffering": "no"}
"""Neither kept nor held back by what is in between."""


logger = logging.getLogger("ragkv.api")


def described(events: str, example: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Events as OpenAPI tells them, one by one. events: what they say · names: theirs, where they have any."""
    event = {"event": {"enum": list(names)}} if names else {}
    item = {"type": "object", "required": ["data", *event], "properties": {"data": {"type": "string"}, **event}}
    return {"itemSchema": {"description": events, **item}, "example": example}


def event(data: Any, name: str | None = None) -> bytes:
    """One event; data becomes JSON."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return format_sse_event(data_str=text, event=name)


class EventStream(Response):
    """Sends events until they end or the client has gone; then the question is let go of."""

    media_type = "text/event-stream"

    def __init__(self, asking: AnswerStream, events: AsyncIterator[bytes]):
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._asking, self._events = asking, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The client is watched by `asking`, which ends the events when it has gone."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for each in self._events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Gone:
            pass
        finally:
            self._asking.cancel()


def ending(error: Exception) -> Fault:
    """What a stream that fails ends with. What nobody expected is logged: the server does that for other responses."""
    fault = fault_of(error)
    current().fault = fault.code
    if fault.status == 500:
        logger.error("an answer failed while it was streamed", exc_info=error)
    return fault
