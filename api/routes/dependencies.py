"""Dependencies of the routes: the engine thread, the tenant, the settings, and the problems that routes document.

Every route refuses query parameters that the OpenAPI schema does not name. A misspelled `collection` would otherwise
read from the default collection, or write into it, without a word.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from ragkv.api.errors import MEDIA_TYPE
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.peers import Peers
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.service import Problem
from ragkv.config import Settings

POLL_SECONDS = 0.1
"""Time between two checks of a job that a request waits for."""


def _engine_thread(request: Request) -> EngineThread:
    engine_thread: EngineThread = request.app.state.engine_thread
    return engine_thread


def _peers(request: Request) -> Peers:
    peers: Peers = request.app.state.peers
    return peers


def _tenant(request: Request) -> Tenant:
    return _caller(request).tenant


def _caller(request: Request) -> Caller:
    return getattr(request.state, "caller", Caller())


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the schema of the route does not name.

    Raises:
        RequestValidationError: Names every unknown parameter, as for an unknown field of a body.
    """
    if not request.query_params:
        return
    operation = request.app.openapi()["paths"][request.scope["route"].path_format][request.method.lower()]
    known = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
    faults = [
        {"type": "unknown_parameter", "loc": ("query", name), "msg": _unknown(known)}
        for name in request.query_params
        if name not in known
    ]
    if faults:
        raise RequestValidationError(faults)


def _unknown(known: set[str]) -> str:
    return "unknown parameter; this route takes " + (", ".join(sorted(known)) or "none")


async def require_room(request: Request) -> None:
    """Refuse documents of a tenant that has used up its room. Raises QuotaExceeded."""
    tenant, limiter = _tenant(request), request.app.state.limiter
    service = _engine_thread(request).catalog_service
    await run_in_threadpool(service.check_room, tenant, limiter.limits(tenant.name).stored)


EngineThreadDep = Annotated[EngineThread, Depends(_engine_thread)]
CallerDep = Annotated[Caller, Depends(_caller)]
PeersDep = Annotated[Peers, Depends(_peers)]
TenantDep = Annotated[Tenant, Depends(_tenant)]
SettingsDep = Annotated[Settings, Depends(_settings)]
READING = (400, 414, 415, 431)
"""What any route answers to a request whose head or text cannot be read."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
    for status in (*READING, 401, 403, 404, 409, 413, 422, 429, 503, 504, 507)
}
"""The `responses` argument of a route."""


def errors_as(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the errors of a route of another API. model: of its error bodies."""
    return {status: {"model": model, "description": HTTPStatus(status).phrase} for status in statuses}
