"""The latest answers: what was answered, and what it was read from."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.schemas.history import AnswerMapOut, AnswerOut, AnswerSummariesOut, brief, drawn, recalled

router = APIRouter()
AnswerId = Annotated[str, Path(max_length=128, description="The `X-Request-ID` of the answer.")]


@router.get("/v1/answers", response_model=AnswerSummariesOut, responses=PROBLEMS)
async def answers(
    worker: EngineThreadDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    before: Annotated[float | None, Query(allow_inf_nan=False, description="The `before` of the page before.")] = None,
) -> Response:
    """The latest answers, newest first, a page at a time. The service keeps some (`RAGKV_HISTORY`) until it ends; those
    that stand on a document, in a collection or in a conversation that was removed are gone with it."""
    # One more than is shown tells whether there is another page.
    found = await run_in_threadpool(
        worker.catalog_service.answers, tenant.name, limit + 1, inf if before is None else before
    )
    page = [brief(each, tenant) for each in found[:limit]]
    return JSONResponse({"answers": page, "before": found[limit - 1].when if len(found) > limit else None})


@router.get("/v1/answers/{answer_id}", response_model=AnswerOut, responses=PROBLEMS)
async def answer(answer_id: AnswerId, worker: EngineThreadDep, tenant: TenantDep) -> Response:
    """An answer as it was given, by the id of its request; the latest, where several had the same."""
    found = await run_in_threadpool(worker.catalog_service.answer, tenant.name, answer_id)
    return JSONResponse(recalled(found, tenant))


@router.get("/v1/answers/{answer_id}/map", response_model=AnswerMapOut, responses=PROBLEMS)
async def answer_map(answer_id: AnswerId, worker: EngineThreadDep, tenant: TenantDep) -> Response:
    """What an answer was read from: for each chunk and layer which blocks were kept, computed again, pulled back or
    dropped, with what they say as long as the document says it."""

    def draw() -> dict[str, Any]:
        found = worker.catalog_service.answer(tenant.name, answer_id)
        return drawn(found, worker.catalog_service.texts(found))

    return JSONResponse(await run_in_threadpool(draw))
