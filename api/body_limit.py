"""Refuses request bodies over a limit before they are read: 413 as problem details."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import problem


class BodyLimit:
    """ASGI middleware. default: bytes a body may have · paths: other limits, by exact path."""

    def __init__(self, app: ASGIApp, default: int, paths: Mapping[str, int]):
        self.app, self.default, self.paths = app, default, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless it announces or sends too much."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit = self.paths.get(scope["path"], self.default)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced) > limit:
            refusal = problem(413, _detail(limit, f"announces {int(announced)}"), "too_large", {"Connection": "close"})
            return await refusal(scope, receive, send)
        await self.app(scope, _counted(receive, limit), send)


def _counted(receive: Receive, limit: int) -> Receive:
    """`receive` that fails as soon as more than `limit` bytes came: chunked bodies announce nothing."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise HTTPException(413, _detail(limit, f"has at least {seen}"), {"Connection": "close"})
        return message

    return counted


def _detail(limit: int, seen: str) -> str:
    return f"a request here may have {limit} bytes, this one {seen}"
