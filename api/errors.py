"""Errors as the client sees them: RFC 9457 problem details, one handler for everything that can go wrong.

    {"title", "status", "detail", "code", …}      media type application/problem+json; `type` is about:blank

`code` is a stable word for programs. Validation adds `errors` [{"at", "message"}]. Input is never echoed.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ragkv.errors import (
    Busy,
    EmbedderChanged,
    InputError,
    InvalidDocument,
    NotCalibrated,
    NotFound,
    QuotaExceeded,
    RagkvError,
    Stopping,
    StoreFull,
    TooLarge,
)

MEDIA_TYPE = "application/problem+json"


# The first match counts, so subclasses stand before their parents.
_STATUS: tuple[tuple[type[RagkvError], int, str], ...] = (
    (NotFound, 404, "not_found"),
    (EmbedderChanged, 409, "embedder_changed"),
    (NotCalibrated, 409, "not_calibrated"),
    (TooLarge, 413, "too_large"),
    (QuotaExceeded, 413, "quota_exceeded"),
    (InvalidDocument, 422, "invalid_document"),
    (InputError, 422, "invalid_request"),
    (Busy, 429, "busy"),
    (StoreFull, 507, "no_space"),
    (Stopping, 503, "stopping"),
    (RagkvError, 503, "unavailable"),
)


def problem(status: int, detail: str, code: str, headers: Mapping[str, str] | None = None, **more: Any) -> JSONResponse:
    """One problem details response."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(content | {"code": code} | more, status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of `app` with problem details."""
    for kind in (RagkvError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, RagkvError):
        return _of_ragkv(error)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return problem(507, "there is no space left on the disk; what was stored before is intact", "no_space")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return problem(503, "this request needs more memory than there is; ask for less", "out_of_memory")
    return problem(500, "an error of the service itself; its log has the details", "internal")


def _of_ragkv(error: RagkvError) -> Response:
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Busy) else None
    return problem(status, str(error), code, headers)


def _of_validation(error: RequestValidationError) -> Response:
    faults = [
        {"at": ".".join(map(str, e["loc"][:8])), "message": str(e["msg"]).removeprefix("Value error, ")}
        for e in error.errors()[:20]
    ]
    detail = "; ".join(f"{fault['at']}: {fault['message']}" for fault in faults[:3])
    return problem(422, detail, "invalid_request", errors=faults)


def _of_http(error: HTTPException) -> Response:
    # FastAPI's own 400 means a body that is no JSON text (bad UTF-8, nesting too deep): the same fault as bad JSON.
    if error.status_code == 400:
        return problem(422, "the body is not readable as UTF-8 JSON", "invalid_request")
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return problem(error.status_code, str(error.detail), code, error.headers)
