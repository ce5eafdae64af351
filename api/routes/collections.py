"""`/v1/collections`: list the collections, or remove one."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.schemas.common import Name
from api.schemas.documents import Collections, to_shown_collection
from ragkv.errors import NotFound

router = APIRouter()


@router.get("/v1/collections", response_model=Collections, responses=PROBLEMS)
async def collections(engine_thread: EngineThreadDep, tenant: TenantDep) -> Response:
    """List the collections that have documents, by name."""
    service = engine_thread.catalog_service
    found = await run_in_threadpool(service.collections, tenant.inside(""))
    return JSONResponse({"collections": [to_shown_collection(info, tenant, service.token_bytes) for info in found]})


@router.delete("/v1/collections/{name:path}", status_code=204, responses=PROBLEMS)
async def remove_collection(name: Name, engine_thread: EngineThreadDep, tenant: TenantDep) -> Response:
    """Delete a collection: all its documents at once, its queued jobs and its conversations."""
    try:
        await run_in_threadpool(engine_thread.catalog_service.remove_collection, tenant.inside(name))
    except NotFound:
        raise NotFound(f"there is no collection {name!r}") from None
    engine_thread.wake()
    return Response(status_code=204)
