"""Jobs: how far what was sent is, and stopping it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response

from api.routes.dependencies import PROBLEMS, EngineThreadDep, TenantDep
from api.routes.job_responses import shown
from api.schemas.documents import RecentJobs
from ingest.jobs import IngestJob, Listed, Status
from ragkv.errors import NotFound

EVENT_SECONDS = 0.25
"""Between two looks at a job that is followed."""

router = APIRouter()


async def _job(job_id: str, worker: EngineThreadDep, tenant: TenantDep) -> IngestJob:
    found = await run_in_threadpool(worker.jobs.get, job_id, "failed")
    if not tenant.owns(found.collection):
        raise NotFound(f"there is no job {job_id!r}")
    return found


async def _watching(worker: EngineThreadDep) -> AsyncIterator[None]:
    worker.catalog_service.watch()
    try:
        yield
    finally:
        worker.catalog_service.leave()


TheJob = Annotated[IngestJob, Depends(_job)]


@router.get("/v1/jobs", response_model=RecentJobs, responses=PROBLEMS)
async def jobs(
    worker: EngineThreadDep,
    tenant: TenantDep,
    status: Annotated[Status | None, Query(description="Only jobs that are so.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The latest jobs, newest first."""
    found = await run_in_threadpool(worker.jobs.recent, limit, tenant.inside(""), status)
    return JSONResponse({"jobs": [shown(job, tenant) for job in found]})


@router.get("/v1/jobs/{job_id}", response_model=IngestJob, responses=PROBLEMS)
async def job(
    found: TheJob,
    worker: EngineThreadDep,
    tenant: TenantDep,
    documents: Annotated[Listed, Query(description="All documents, or the first 20 that failed.")] = "failed",
) -> Response:
    """How far a job is. `stage`, `done` and `total` are of the document being read, `counts` of all."""
    if documents == "all":
        found = await run_in_threadpool(worker.jobs.get, found.id, documents)
    return JSONResponse(shown(found, tenant))


@router.post("/v1/jobs/{job_id}/cancel", response_model=IngestJob, responses=PROBLEMS)
async def cancel(found: TheJob, worker: EngineThreadDep, tenant: TenantDep) -> Response:
    """Stop a job: what waits is dropped, what is being read stops at its next chunk. Documents that are in stay in.
    A job that is done stays as it is."""
    return JSONResponse(shown(await run_in_threadpool(worker.jobs.cancel, found.id, "failed"), tenant))


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=EventSourceResponse,
    responses=PROBLEMS,
    dependencies=[Depends(_watching)],
)
async def events(found: TheJob, worker: EngineThreadDep, tenant: TenantDep) -> AsyncIterator[ServerSentEvent]:
    """Follow a job: `progress` with the job whenever it has changed, `done` with it at its end, then the stream ends.
    A stream that ends without `done` is taken up by asking again."""
    told: IngestJob | None = None
    while not worker.stopping:
        if found != told:
            told, name = found, "progress" if found.finished is None else "done"
            yield ServerSentEvent(data=shown(found, tenant), event=name)
        if found.finished is not None:
            return
        await asyncio.sleep(EVENT_SECONDS)
        found = await run_in_threadpool(worker.jobs.get, found.id, "failed")
