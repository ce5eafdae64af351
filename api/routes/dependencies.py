"""Dependencies of the routes: the engine thread, the tenant, the settings, and the problems that routes document."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request

from api.errors import MEDIA_TYPE
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from api.schemas.common import Problem
from ragkv.config import Settings

POLL_SECONDS = 0.1
"""Time between two checks of a job that a request waits for."""


def _engine_thread(request: Request) -> EngineThread:
    engine_thread: EngineThread = request.app.state.engine_thread
    return engine_thread


def _tenant(request: Request) -> Tenant:
    return getattr(request.state, "tenant", Tenant())


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


EngineThreadDep = Annotated[EngineThread, Depends(_engine_thread)]
TenantDep = Annotated[Tenant, Depends(_tenant)]
SettingsDep = Annotated[Settings, Depends(_settings)]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
    for status in (401, 404, 409, 413, 422, 429, 503, 504, 507)
}
"""The `responses` argument of a route."""
