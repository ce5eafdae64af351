"""Security-header middleware: sets headers on every response, including those of refused and failed requests.

The API serves no pages. The headers tell browsers to run no scripts, to allow no frames, to guess no content types and
to store no copies. A route that serves a page, or that may be cached, sets its own `Content-Security-Policy` or
`Cache-Control`, which stays.

Every request has an id. A client may send its own as `X-Request-ID`, if it is short and plain; otherwise a new id is
made. The response repeats it.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class SecurityHeadersMiddleware:
    """The outermost ASGI middleware."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and add the missing headers to its response."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent_id = Headers(scope=scope).get("x-request-id", "")
        request_id = sent_id if _ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["X-Request-ID"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_headers)
