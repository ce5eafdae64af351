"""Head middleware: answers HEAD wherever GET is answered, with the headers of that answer and without its body.

Link checkers, uptime monitors and some proxies ask so. A route needs to know nothing of it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Enough(OSError):
    """The headers of a stream are sent, and its body has no reader."""


class HeadMiddleware:
    """The innermost ASGI middleware: whatever is outside it sees a HEAD."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a HEAD on as a GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self.app(scope, receive, send)
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not ended:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message["type"] == "http.response.body" and message.get("more_body", False):
                raise _Enough

        scope["method"] = "GET"  # the log reads from this scope which route it was
        try:
            await self.app(scope, receive, send_head)
        except Exception:
            if not ended:
                raise
        finally:
            scope["method"] = "HEAD"
