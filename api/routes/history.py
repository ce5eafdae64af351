"""`GET /v1/answers`: the latest answers, and the blocks that each was answered from."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, EngineThreadDep, PeersDep, TenantDep
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.catalog_service import CatalogService
from ragkv.api.runtime.peers import Peers
from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.history import (
    AnswerMapOut,
    AnswerOut,
    AnswerSummariesOut,
    to_answer,
    to_answer_map,
    to_answer_summary,
)
from ragkv.errors import NotFound

router = APIRouter()
AnswerId = Annotated[str, Path(max_length=128, description="The `X-Request-ID` of the answer.")]


@router.get("/v1/answers", response_model=AnswerSummariesOut, responses=PROBLEMS)
async def answers(
    engine_thread: EngineThreadDep,
    peers: PeersDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    before: Annotated[
        float | None, Query(allow_inf_nan=False, description="The `before` of the previous page.")
    ] = None,
) -> Response:
    """List the latest answers, newest first, in pages. The service keeps some of them (`RAGKV_HISTORY`) until it stops.
    An answer is removed with any document, collection or conversation that it is based on."""
    service, start = engine_thread.catalog_service, inf if before is None else before
    # One more than the limit is fetched, to know whether there is another page.
    own = await run_in_threadpool(service.answers, tenant.name, limit + 1, start)
    found = sorted([*own, *await peers.answers(tenant.name, limit + 1, start)], key=lambda each: -each.when)
    page = [to_answer_summary(each, tenant) for each in found[:limit]]
    return JSONResponse({"answers": page, "before": found[limit - 1].when if len(found) > limit else None})


@router.get("/v1/answers/{answer_id}", response_model=AnswerOut, responses=PROBLEMS)
async def answer(answer_id: AnswerId, engine_thread: EngineThreadDep, peers: PeersDep, tenant: TenantDep) -> Response:
    """Show an answer by the id of its request. If several requests had this id, the latest one is shown."""
    found = await _find(answer_id, engine_thread.catalog_service, peers, tenant)
    return JSONResponse(to_answer(found, tenant))


@router.get("/v1/answers/{answer_id}/map", response_model=AnswerMapOut, responses=PROBLEMS)
async def answer_map(
    answer_id: AnswerId, engine_thread: EngineThreadDep, peers: PeersDep, tenant: TenantDep
) -> Response:
    """Show what an answer was read from: for each chunk and layer which blocks were kept, recomputed, pulled in during
    decode or dropped, with their text as long as the document still has it."""
    service = engine_thread.catalog_service
    found = await _find(answer_id, service, peers, tenant)

    def build() -> dict[str, Any]:
        return to_answer_map(found, service.texts(found))

    return JSONResponse(await run_in_threadpool(build))


async def _find(id: str, service: CatalogService, peers: Peers, tenant: Tenant) -> RecordedAnswer:
    """Return an answer of this replica, else of another one. Raises NotFound."""
    try:
        return await run_in_threadpool(service.answer, tenant.name, id)
    except NotFound:
        found = await peers.answer(tenant.name, id)
        if found is None:
            raise
        return found
