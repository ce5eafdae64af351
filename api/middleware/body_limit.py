"""Body-limit middleware: answers 413 to a request body over a limit before the body is read.

The limits are of its bytes and, in JSON, of those that are syntax (json_syntax.py). It also refuses content types that
the API does not read with 415, and what is not UTF-8 (encodings.py), while it counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.api.errors import Fault, error_response
from ragkv.api.middleware.encodings import BodyText, fault_of_encoding
from ragkv.api.middleware.json_syntax import MOST, JsonSyntax

DOCUMENTS = "/v1/documents"
MCP = "/mcp"
"""Path of the MCP server. Its tool `ingest` takes documents."""
UPLOAD_DOCUMENTS = 4
"""Limit of an upload, in largest documents. Each file is limited to one document as well."""
_BODY_BYTES = 2 * 2**20
_OVERHEAD_BYTES = 2**20  # JSON or form syntax around documents
_JSON = re.compile(r"\s*application/([^\s;/]+\+)?json\s*(;|$)", re.IGNORECASE)
_SYNTAX = f"the JSON of this request has over {MOST} bytes of syntax and numbers; send fewer values at a time"


@dataclass(frozen=True)
class BodyBounds:
    """Limits of request bodies.

    Attributes:
        document: Bytes of the largest document (max_document_bytes).
    """

    document: int

    def of(self, scope: Scope) -> int:
        """Return the most bytes that the body of this request may have."""
        if scope["path"] == MCP:
            return self.document + _OVERHEAD_BYTES
        if scope["path"] != DOCUMENTS and not scope["path"].startswith(DOCUMENTS + "/"):
            return _BODY_BYTES
        return self.document * (UPLOAD_DOCUMENTS if is_form(scope) else 1) + _OVERHEAD_BYTES


class BodyLimitMiddleware:
    """ASGI middleware that enforces the limits."""

    def __init__(self, app: ASGIApp, bounds: BodyBounds):
        self.app, self.bounds = app, bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless it announces or sends too much."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if (unreadable := fault_of_encoding(scope) or _fault_of_kind(scope)) is not None:
            return await error_response(unreadable, scope)(scope, receive, send)
        limit = self.bounds.of(scope)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced) > limit:
            fault = Fault(413, _detail(limit, f"announces {int(announced)}"), "too_large", {"Connection": "close"})
            return await error_response(fault, scope)(scope, receive, send)
        syntax = None if is_form(scope) else JsonSyntax()
        await self.app(scope, _limited(receive, limit, BodyText(scope), syntax), send)


def is_form(scope: Scope) -> bool:
    """Return whether the headers declare a multipart form."""
    content_type = Headers(scope=scope).get("content-type", "").partition(";")[0]
    return content_type.strip().lower() == "multipart/form-data"


def _fault_of_kind(scope: Scope) -> Fault | None:
    """Return why a body of the API is not read: its content type or its content coding."""
    headers, path = Headers(scope=scope), scope["path"]
    if not path.startswith("/v1/") or not _has_body(headers):
        return None
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        return Fault(415, "bodies are read as they are; send none with a Content-Encoding", "unsupported_coding")
    form = path == DOCUMENTS and scope["method"] == "POST"
    if _JSON.match(headers.get("content-type", "")) or (form and is_form(scope)):
        return None
    kinds = "application/json" + (" or multipart/form-data" if form else "")
    return Fault(415, f"this route reads {kinds}; say so in Content-Type", "unsupported_media_type")


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _limited(receive: Receive, limit: int, text: BodyText, syntax: JsonSyntax | None) -> Receive:
    """Wrap `receive` so that it fails after more than `limit` bytes, which a chunked body does not announce.

    It also fails at bytes that are no text and, with `syntax`, after more than MOST bytes of JSON syntax.
    """
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        chunk = message.get("body", b"")
        received += len(chunk)
        if received > limit:
            raise HTTPException(413, _detail(limit, f"has at least {received}"), {"Connection": "close"})
        if message["type"] == "http.request":
            text.check(chunk, not message.get("more_body", False))
        if syntax is not None:
            syntax.add(chunk)
            if syntax.count > MOST:
                raise HTTPException(413, _SYNTAX, {"Connection": "close"})
        return message

    return receive_limited


def _detail(limit: int, size: str) -> str:
    return f"the body of this request may have {limit} bytes, but it {size}"
