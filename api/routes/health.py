"""Health: whether the service lives, and whether it can answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from api.dependencies import PROBLEMS, TheWorker
from api.schemas import Readiness

router = APIRouter()

_COUNTS = ("waiting", "running", "cancelled", "expired", "refused")


@router.get("/healthz")
async def healthz(request: Request, worker: TheWorker) -> Response:
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
async def readyz(worker: TheWorker) -> Response:
    """Readiness: 200 when questions can be answered, 503 when not. A store that is down or a line that is full is told
    and no reason not to be ready: answers are made without the one, and room in the other comes by itself."""
    health = worker.health()
    checks = _checks(health, worker.stopping)
    ready = all(check["status"] != "failed" for check in checks.values())
    queue = {"places": health["queue"], **{name: health[name] for name in _COUNTS}}
    content = {"status": "ready" if ready else "not_ready", "checks": checks, "queue": queue}
    return JSONResponse(content, 200 if ready else 503)


def _checks(health: dict[str, Any], stopping: bool) -> dict[str, dict[str, str]]:
    serving = health["status"] in ("ok", "degraded")
    engine = "the service is shutting down" if stopping else "" if serving else health.get("reason", health["status"])
    store, reuse, index = (health.get(name, "not known") for name in ("store", "reuse", "index"))
    full = health["waiting"] >= health["queue"]
    return {
        "engine": _check(engine, "failed"),
        "catalogue": _check("" if "documents" in health else health.get("reason", "not known"), "failed"),
        "index": _check("" if index == "ok" else index, "failed"),
        "store": _check("" if store == "ok" else store, "degraded"),
        "reuse": _check("" if reuse == "on" else reuse, "degraded"),
        "queue": _check("there is no place left" if full else "", "degraded"),
    }


def _check(fault: str, otherwise: str) -> dict[str, str]:
    return {"status": otherwise if fault else "ok", "detail": fault}
