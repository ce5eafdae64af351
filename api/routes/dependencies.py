"""What routes ask for: the worker, whose request it is, and the problems they document."""

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
"""Between two looks at what a request waits for."""


def _worker(request: Request) -> EngineThread:
    worker: EngineThread = request.app.state.worker
    return worker


def _tenant(request: Request) -> Tenant:
    return getattr(request.state, "tenant", Tenant())


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


EngineThreadDep = Annotated[EngineThread, Depends(_worker)]
TenantDep = Annotated[Tenant, Depends(_tenant)]
SettingsDep = Annotated[Settings, Depends(_settings)]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
    for status in (401, 404, 409, 413, 422, 429, 503, 504, 507)
}
"""`responses` of a route."""
