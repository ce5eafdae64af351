"""`/v1/collections`: list the collections, or remove one."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, CallerDep, EngineThreadDep, TenantDep
from ragkv.api.runtime.removal import remove_collection_of
from ragkv.api.schemas.common import Name
from ragkv.api.schemas.documents import Collections, to_shown_collection

router = APIRouter()


@router.get("/v1/collections", response_model=Collections, responses=PROBLEMS)
async def collections(engine_thread: EngineThreadDep, tenant: TenantDep) -> Response:
    """List the collections that have documents, by name."""
    service = engine_thread.catalog_service
    found = await run_in_threadpool(service.collections, tenant.inside(""))
    return JSONResponse({"collections": [to_shown_collection(info, tenant, service.kv.token_bytes) for info in found]})


@router.delete("/v1/collections/{name:path}", status_code=204, responses=PROBLEMS)
async def remove_collection(name: Name, engine_thread: EngineThreadDep, caller: CallerDep) -> Response:
    """Delete a collection: all its documents at once, its queued jobs and its conversations."""
    await run_in_threadpool(remove_collection_of, caller, name, engine_thread)
    return Response(status_code=204)
