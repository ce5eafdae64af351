"""Health: whether the service lives, and whether it can answer."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from api.observability.readiness import checks
from api.routes.dependencies import PROBLEMS, EngineThreadDep
from api.schemas.common import Readiness

router = APIRouter()

_COUNTS = ("waiting", "running", "cancelled", "expired", "refused")


@router.get("/healthz")
async def healthz(request: Request, worker: EngineThreadDep) -> Response:
    """Liveness: 200 as long as the service answers; `status` is ok, or degraded when answers take longer. Needs no key;
    where there are keys it tells the status alone."""
    health = worker.health()
    told = {"status": health["status"]} if request.app.state.keys else health
    return JSONResponse(told, 503 if health["status"] == "failed" else 200)


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={401: PROBLEMS[401], 503: {"model": Readiness, "description": "Not now; `checks` says why."}},
)
async def readyz(worker: EngineThreadDep) -> Response:
    """Readiness: 200 when questions can be answered, 503 when not. A store that is down or a line that is full is told
    and no reason not to be ready: answers are made without the one, and room in the other comes by itself."""
    health = worker.health()
    found = checks(health, worker.stopping)
    ready = all(check["status"] != "failed" for check in found.values())
    queue = {"places": health["queue"], **{name: health[name] for name in _COUNTS}}
    content = {"status": "ready" if ready else "not_ready", "checks": found, "queue": queue}
    return JSONResponse(content, 200 if ready else 503)
