"""Requests: how many came, by route, method and status, whoever answered them.

The label is the route's template and never the path, so that neither ids nor guesses of paths are in it, and there are
as many labels as there are routes. What met no route (it is unknown, or was refused before) is `other`.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER = "other"


class Requests:
    """counts: by (route, method, status). Of one event loop."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def came(self, scope: Scope, status: int) -> None:
        """A request got this status."""
        route = getattr(scope.get("route"), "path_format", None) or OTHER
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self.counts[route, method, str(status)] += 1


class Counted:
    """ASGI middleware, around what makes responses of errors."""

    def __init__(self, app: ASGIApp, requests: Requests):
        self.app, self.requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count it when its response begins."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.requests.came(scope, message["status"])
            await send(message)

        await self.app(scope, receive, counted)
