"""Collections: what there is, and forgetting one."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.schemas.common import Name
from api.schemas.documents import Collections, summed
from ragkv.errors import NotFound

router = APIRouter()


@router.get("/v1/collections", response_model=Collections, responses=PROBLEMS)
async def collections(worker: EngineThreadDep, tenant: TenantDep) -> Response:
    """The collections that have documents, by name."""
    found = await run_in_threadpool(worker.catalog_service.collections, tenant.inside(""))
    return JSONResponse({"collections": [summed(info, tenant, worker.catalog_service.token_bytes) for info in found]})


@router.delete("/v1/collections/{name:path}", status_code=204, responses=PROBLEMS)
async def remove_collection(name: Name, worker: EngineThreadDep, tenant: TenantDep) -> Response:
    """Forget a collection: its documents all at once, what waits for it, and its conversations."""
    try:
        await run_in_threadpool(worker.catalog_service.remove_collection, tenant.inside(name))
    except NotFound:
        raise NotFound(f"there is no collection {name!r}") from None
    worker.wake()
    return Response(status_code=204)
