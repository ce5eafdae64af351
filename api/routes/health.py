"""`/healthz`, which chat programs and proxies know as `/health`, and `/readyz`: liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ragkv.api.observability.readiness import readiness_checks
from ragkv.api.routes.dependencies import PROBLEMS, READING, EngineThreadDep
from ragkv.api.schemas.service import Readiness

router = APIRouter()

_COUNTS = ("waiting", "running", "cancelled", "expired", "refused")


@router.get("/healthz", responses={status: PROBLEMS[status] for status in (*READING, 403, 422)})
@router.get("/health", responses={status: PROBLEMS[status] for status in (*READING, 403, 422)})
async def healthz(request: Request, engine_thread: EngineThreadDep) -> Response:
    """Liveness: 200 as long as the service answers. `status` is ok, or degraded when answers take longer. Needs no key.
    If the service has keys, it shows the status alone."""
    health = engine_thread.health()
    content = {"status": health["status"]} if request.app.state.authenticator else health
    return JSONResponse(content, 503 if health["status"] == "failed" else 200)


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={
        **{status: PROBLEMS[status] for status in (*READING, 401, 403, 422)},
        503: {"model": Readiness, "description": "Not ready; `checks` says why."},
    },
)
async def readyz(engine_thread: EngineThreadDep) -> Response:
    """Readiness: 200 when questions can be answered, 503 when not. A store that is down or a full queue is reported but
    does not make the service unready: answers need no store, and the queue empties by itself."""
    health = engine_thread.health()
    checks = readiness_checks(health, engine_thread.stopping)
    ready = all(check["status"] != "failed" for check in checks.values())
    queue = {"places": health["queue"], **{name: health[name] for name in _COUNTS}}
    content = {"status": "ready" if ready else "not_ready", "checks": checks, "queue": queue}
    return JSONResponse(content, 200 if ready else 503)
