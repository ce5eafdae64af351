"""Errors as the client sees them: RFC 9457 problem details, one handler for everything that can go wrong.

    {"type": "about:blank", "title", "status", "detail", "code", "request_id", …}      application/problem+json

`code` is a stable word for programs. Validation adds `errors` [{"at", "message"}]. Input is never echoed. On the routes
that speak OpenAI's language it is OpenAI's error object:

    {"error": {"message", "type", "param", "code"}}
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from api.runtime.request_context import current
from api.runtime.tenants import Tenant
from ingest.jobs import JobFault, code_of
from ragkv.errors import (
    Busy,
    EmbedderChanged,
    Expired,
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
_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")


class Gone(Exception):
    """The client has hung up: there is nobody to answer."""


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
    (Expired, 504, "deadline"),
    (RagkvError, 503, "unavailable"),
)


@dataclass(frozen=True)
class Fault:
    """What is told about something that went wrong. more: other members of the problem."""

    status: int
    detail: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def problem(self, request_id: str = "") -> dict[str, Any]:
        """As RFC 9457 problem details."""
        title = HTTPStatus(self.status).phrase
        content = {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail}
        named = {"request_id": request_id} if request_id else {}
        return content | {"code": self.code} | named | dict(self.more)

    @property
    def on_openai(self) -> int:
        """Its status there: what is not as it must be is 400, whatever about it."""
        return 400 if self.status == 422 else self.status

    def openai(self) -> dict[str, Any]:
        """As OpenAI's error object. param: the field that is wrong, where it is one."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        at = next((str(fault["at"]).removeprefix("body.") for fault in self.more.get("errors", ())), None)
        return {"error": {"message": self.detail, "type": kind, "param": at, "code": self.code}}


def refusal(fault: Fault, scope: Scope) -> JSONResponse:
    """The response to a request, in the form that its path wants."""
    current().fault = fault.code
    if speaks_openai(scope["path"]):
        return JSONResponse(fault.openai(), fault.on_openai, headers=fault.headers)
    content = fault.problem(scope.get("state", {}).get("request_id", ""))
    return JSONResponse(content, fault.status, headers=fault.headers, media_type=MEDIA_TYPE)


def speaks_openai(path: str) -> bool:
    """Whether errors at this path are OpenAI's."""
    return path == "/v1/models" or path.startswith(("/v1/chat/", "/v1/models/"))


def of_job(error: JobFault | None) -> Fault:
    """Why a job that was waited for brought nothing, as if it had been said at once. None: it was cancelled."""
    if error is None:
        return Fault(409, "cancelled before it was done: the document was deleted meanwhile", "cancelled")
    known = ((status, code) for kind, status, code in _STATUS if code_of(kind) == error.code)
    status, code = next(known, (503, "unavailable") if error.code != "internal_error" else (500, "internal"))
    return Fault(status, Tenant(current().tenant).told(error.message), code)


def install(app: FastAPI) -> None:
    """Answer every error of `app` with problem details."""
    for kind in (Gone, RagkvError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, Gone):
        return Response(status_code=499)  # for the log: nobody reads it
    fault = fault_of(error)
    if fault.status == 405:
        fault = replace(fault, headers={"Allow": ", ".join(_allowed(request))})
    return refusal(fault, request.scope)


def _allowed(request: Request) -> list[str]:
    """The methods of a path. Each may have a route of its own, and Starlette names those of the first one alone."""
    asked = {"type": "http", "path": request.scope["path"], "root_path": "", "headers": []}
    routes = request.app.router.routes
    return [method for method in _METHODS if any(_is(route, {**asked, "method": method}) for route in routes)]


def _is(route: BaseRoute, scope: Scope) -> bool:
    return route.matches(scope)[0] is Match.FULL


def fault_of(error: Exception) -> Fault:
    """What to tell about an error. Of those that nobody expected nothing is told."""
    if isinstance(error, RagkvError):
        return _of_ragkv(error)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Fault(507, "there is no space left on the disk; what was stored before is intact", "no_space")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Fault(503, "this request needs more memory than there is; ask for less", "out_of_memory")
    return Fault(500, "an error of the service itself; its log has the details", "internal")


def _of_ragkv(error: RagkvError) -> Fault:
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Busy) else {}
    return Fault(status, Tenant(current().tenant).told(str(error)), code, headers)


def _of_validation(error: RequestValidationError) -> Fault:
    faults = [
        {"at": ".".join(map(str, e["loc"][:8])), "message": str(e["msg"]).removeprefix("Value error, ")}
        for e in error.errors()[:20]
    ]
    detail = "; ".join(f"{fault['at']}: {fault['message']}" for fault in faults[:3])
    return Fault(422, detail, "invalid_request", more={"errors": faults})


def _of_http(error: HTTPException) -> Fault:
    # FastAPI's own 400 means a body that is no JSON text (bad UTF-8, nesting too deep) or no form: as bad JSON.
    if error.status_code == 400:
        own = error.detail == "There was an error parsing the body"
        return Fault(422, "the body is not readable as UTF-8 JSON" if own else str(error.detail), "invalid_request")
    # The phrase of 413 is another one in each version of Python.
    code = "too_large" if error.status_code == 413 else HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return Fault(error.status_code, str(error.detail), code, error.headers or {})
