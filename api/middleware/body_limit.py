"""Refuses request bodies over a limit before they are read: 413."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import Fault, refusal

DOCUMENTS = "/v1/documents"
UPLOAD_DOCUMENTS = 4
"""Largest documents that one upload may hold; each file is bounded by itself, too."""
_BODY_BYTES = 2 * 2**20
_SLACK_BYTES = 2**20  # of JSON, or of a form, around documents


@dataclass(frozen=True)
class BodyBounds:
    """Bytes that requests may have. document: of the largest document (max_document_bytes)."""

    document: int

    def of(self, scope: Scope) -> int:
        """The bound of this request."""
        if scope["path"] != DOCUMENTS and not scope["path"].startswith(DOCUMENTS + "/"):
            return _BODY_BYTES
        return self.document * (UPLOAD_DOCUMENTS if is_form(scope) else 1) + _SLACK_BYTES


class BodyLimitMiddleware:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, bounds: BodyBounds):
        self.app, self.bounds = app, bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless it announces or sends too much."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit = self.bounds.of(scope)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced) > limit:
            fault = Fault(413, _detail(limit, f"announces {int(announced)}"), "too_large", {"Connection": "close"})
            return await refusal(fault, scope)(scope, receive, send)
        await self.app(scope, _counted(receive, limit), send)


def is_form(scope: Scope) -> bool:
    """Whether the request's body is a multipart form, as its headers say."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0]
    return kind.strip().lower() == "multipart/form-data"


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
