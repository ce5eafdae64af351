"""Error responses: RFC 9457 problem details, from one handler for every error.

    {"type": "about:blank", "title", "status", "detail", "code", "request_id", …}      application/problem+json

`code` is a stable word for programs. Validation errors add `errors` [{"at", "message"}]. The input is never echoed. The
routes of other APIs answer in their forms (error_forms.py).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from ragkv.api.error_forms import form_of, told_of
from ragkv.api.runtime.request_context import current
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.faults import fields_of, readable
from ragkv.errors import (
    Busy,
    CatalogCorrupt,
    EmbedderChanged,
    Expired,
    Forbidden,
    InputError,
    InvalidDocument,
    NoReranker,
    NotCalibrated,
    NotFound,
    Outdated,
    OutOfMemory,
    QuotaExceeded,
    RagkvError,
    Restarting,
    Stopping,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    is_out_of_memory,
)
from ragkv.ingest.job_entries import code_of
from ragkv.ingest.jobs import JobFault

logger = logging.getLogger("ragkv.api")

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2
"""When to ask again where the catalogue or the store did not answer: most servers start again in this time."""
_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")


class Gone(Exception):
    """The client has disconnected, so no response can be sent."""


# The first match wins, so a subclass stands before its parent.
_STATUS: tuple[tuple[type[RagkvError], int, str], ...] = (
    (Forbidden, 403, "forbidden"),
    (NotFound, 404, "not_found"),
    (EmbedderChanged, 409, "embedder_changed"),
    (NotCalibrated, 409, "not_calibrated"),
    (NoReranker, 409, "no_reranker"),
    (TooLarge, 413, "too_large"),
    (QuotaExceeded, 413, "quota_exceeded"),
    (InvalidDocument, 422, "invalid_document"),
    (InputError, 422, "invalid_request"),
    (Busy, 429, "busy"),
    (StoreFull, 507, "no_space"),
    (CatalogCorrupt, 503, "catalogue_damaged"),
    (Stopping, 503, "stopping"),
    (Restarting, 503, "restarting"),
    (Outdated, 503, "document_changed"),
    (OutOfMemory, 503, "out_of_memory"),
    (Expired, 504, "deadline"),
    (RagkvError, 503, "unavailable"),
)


@dataclass(frozen=True)
class Fault:
    """An error as the client sees it.

    Attributes:
        status: HTTP status.
        detail: One sentence for people.
        code: A stable word for programs.
        headers: Headers of the response.
        extra: Further members of the problem details.
    """

    status: int
    detail: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_problem(self, request_id: str = "") -> dict[str, Any]:
        """Convert to RFC 9457 problem details."""
        title = HTTPStatus(self.status).phrase
        content = {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail}
        identity = {"request_id": request_id} if request_id else {}
        return content | {"code": self.code} | identity | dict(self.extra)


def error_response(fault: Fault, scope: Scope) -> JSONResponse:
    """Build the error response to a request, in the format of its route."""
    current().fault = fault.code
    request_id, form = scope.get("state", {}).get("request_id", ""), form_of(scope["path"])
    if form is not None:
        status = 400 if fault.status == 422 else fault.status
        return JSONResponse(form(fault, request_id), status, headers=fault.headers)
    return JSONResponse(fault.to_problem(request_id), fault.status, headers=fault.headers, media_type=MEDIA_TYPE)


def fault_of_job(error: JobFault | None) -> Fault:
    """Convert the error of a job to the fault that a direct request would have got.

    Args:
        error: Error of the job; None if the job was cancelled.
    """
    if error is None:
        return Fault(409, "the job was cancelled because the document was deleted", "cancelled")
    matches = ((status, code) for kind, status, code in _STATUS if code_of(kind) == error.code)
    status, code = next(matches, (503, "unavailable") if error.code != "internal_error" else (500, "internal"))
    return Fault(status, Tenant(current().tenant).told(error.message), code)


def install(app: FastAPI) -> None:
    """Register the handler for every kind of error."""
    for kind in (Gone, RagkvError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, Gone):
        return Response(status_code=499)  # for the log only: the client has disconnected
    if isinstance(error, RequestValidationError):
        fault = _of_validation(error, request.scope.get("route"))
    else:
        fault = fault_of(error)
    if fault.status == 405:
        fault = replace(fault, headers={"Allow": ", ".join(_allowed_methods(request))})
    if fault.code == "internal":  # Starlette raises the error again, and uvicorn closes the connection
        fault = replace(fault, headers={"Connection": "close"})
    return error_response(fault, request.scope)


def _allowed_methods(request: Request) -> list[str]:
    """List the methods of a path. Several routes may share a path, and Starlette lists only those of the first."""
    scope = {"type": "http", "path": request.scope["path"], "root_path": "", "headers": []}
    routes = request.app.router.routes
    found = {method for method in _METHODS if any(_matches(route, {**scope, "method": method}) for route in routes)}
    return sorted(found | ({"HEAD"} if "GET" in found else set()))  # middleware/head.py answers it


def _matches(route: BaseRoute, scope: Scope) -> bool:
    return route.matches(scope)[0] is Match.FULL


def fault_of(error: Exception) -> Fault:
    """Convert an exception to what the client may see. An unexpected exception reveals nothing about itself."""
    if isinstance(error, RagkvError):
        return _of_ragkv(error)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Fault(507, "there is no space left on the disk; what was stored before is intact", "no_space")
    if is_out_of_memory(error):
        return _of_ragkv(OutOfMemory())
    return Fault(500, "internal error; the log of the service has the details", "internal")


def _of_ragkv(error: RagkvError) -> Fault:
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    headers = {}
    if isinstance(error, Busy | OutOfMemory | Outdated | Restarting | StoreUnavailable):
        after = error.retry_after if isinstance(error, Busy | Restarting) else RETRY_SECONDS
        headers = {"Retry-After": str(after)}
    if error.public != error.message:
        logger.warning("a request got %d (%s): %s", status, code, error)
    return Fault(status, Tenant(current().tenant).told(error.public), code, headers)


def _of_validation(error: RequestValidationError, route: BaseRoute | None = None) -> Fault:
    body = route.body_field if isinstance(route, APIRoute) else None
    kind: Any = body.field_info.annotation if body is not None else None
    fields = fields_of(kind) if kind is not None else frozenset[str]()
    errors = readable(error.errors()[:20], error.body, fields)
    return Fault(422, told_of(errors), "invalid_request", extra={"errors": errors})


def _of_http(error: HTTPException) -> Fault:
    # FastAPI raises 400 for a body that is not JSON text (bad UTF-8, nesting too deep) or not a form. Bad JSON is a
    # 422, so this is one, too.
    if error.status_code == 400:
        unreadable = error.detail == "There was an error parsing the body"
        detail = "the body is not readable as UTF-8 JSON" if unreadable else str(error.detail)
        return Fault(422, detail, "invalid_request")
    # The phrase of status 413 differs between versions of Python.
    code = "too_large" if error.status_code == 413 else HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    nowhere = error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase
    detail = "the service has no such path; /docs lists all that it has" if nowhere else str(error.detail)
    return Fault(error.status_code, detail, code, error.headers or {})
