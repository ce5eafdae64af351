"""The latest answers: what was answered, and what it was read from."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api.dependencies import PROBLEMS, TheTenant, TheWorker
from api.history_schemas import AnswerMap, Briefs, Recalled, brief, drawn, recalled

router = APIRouter()
AnswerId = Annotated[str, Path(max_length=128, description="The `X-Request-ID` of the answer.")]


@router.get("/v1/answers", response_model=Briefs, responses=PROBLEMS)
async def answers(
    worker: TheWorker,
    tenant: TheTenant,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    before: Annotated[float | None, Query(allow_inf_nan=False, description="The `before` of the page before.")] = None,
) -> Response:
    """The latest answers, newest first, a page at a time. The service keeps some (`RAGKV_HISTORY`) until it ends; those
    that stand on a document, in a collection or in a conversation that was removed are gone with it."""
    # One more than is shown tells whether there is another page.
    found = await run_in_threadpool(worker.holdings.answers, tenant.name, limit + 1, inf if before is None else before)
    page = [brief(each, tenant) for each in found[:limit]]
    return JSONResponse({"answers": page, "before": found[limit - 1].when if len(found) > limit else None})


@router.get("/v1/answers/{answer_id}", response_model=Recalled, responses=PROBLEMS)
async def answer(answer_id: AnswerId, worker: TheWorker, tenant: TheTenant) -> Response:
    """An answer as it was given, by the id of its request; the latest, where several had the same."""
    found = await run_in_threadpool(worker.holdings.answer, tenant.name, answer_id)
    return JSONResponse(recalled(found, tenant))


@router.get("/v1/answers/{answer_id}/map", response_model=AnswerMap, responses=PROBLEMS)
async def answer_map(answer_id: AnswerId, worker: TheWorker, tenant: TheTenant) -> Response:
    """What an answer was read from: for each chunk and layer which blocks were kept, computed again, pulled back or
    dropped, with what they say as long as the document says it."""

    def draw() -> dict[str, Any]:
        found = worker.holdings.answer(tenant.name, answer_id)
        return drawn(found, worker.holdings.texts(found))

    return JSONResponse(await run_in_threadpool(draw))
