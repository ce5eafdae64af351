"""Strict: what every response says, whoever made it, those of refused and failed requests included.

Nothing here is a page, so browsers are told to make nothing of it: no scripts, no frames, no guessed types, no copies.
A route that is one (or may be kept) sets its own `Content-Security-Policy` (or `Cache-Control`), which stays.

Every request has an id: `X-Request-ID` as the client sent it, where it is short and plain, else a new one.
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
    """ASGI middleware, around everything else."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; its response gets the headers it lacks."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = id

        async def strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["X-Request-ID"] = id
            await send(message)

        await self.app(scope, receive, strict)
