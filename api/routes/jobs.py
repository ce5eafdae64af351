"""`/v1/jobs`: the progress of ingest jobs, and cancelling one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response

from ragkv.api.routes.dependencies import PROBLEMS, CallerDep, EngineThreadDep, TenantDep
from ragkv.api.routes.event_stream import stream_fault
from ragkv.api.routes.job_responses import to_content
from ragkv.api.runtime.removal import cancel_job_of
from ragkv.api.schemas.documents import RecentJobs
from ragkv.errors import NotFound
from ragkv.ingest.jobs import IngestJob, Listed, Status

EVENT_SECONDS = 0.25
"""Time between two checks of a job that a client follows."""

router = APIRouter()


async def _job(job_id: str, engine_thread: EngineThreadDep, tenant: TenantDep) -> IngestJob:
    job = await run_in_threadpool(engine_thread.jobs.get, job_id, "failed")
    if not tenant.owns(job.collection):
        raise NotFound(f"there is no job {job_id!r}")
    return job


async def _watcher(engine_thread: EngineThreadDep) -> AsyncIterator[None]:
    """Count the client as a watcher while the request lasts."""
    engine_thread.catalog_service.watch()
    try:
        yield
    finally:
        engine_thread.catalog_service.leave()


JobDep = Annotated[IngestJob, Depends(_job)]


@router.get("/v1/jobs", response_model=RecentJobs, responses=PROBLEMS)
async def jobs(
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    status: Annotated[Status | None, Query(description="Only jobs with this status.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List the latest jobs, newest first."""
    found = await run_in_threadpool(engine_thread.jobs.recent, limit, tenant.inside(""), status)
    return JSONResponse({"jobs": [to_content(job, tenant) for job in found]})


@router.get("/v1/jobs/{job_id}", response_model=IngestJob, responses=PROBLEMS)
async def job(
    found: JobDep,
    engine_thread: EngineThreadDep,
    tenant: TenantDep,
    documents: Annotated[Listed, Query(description="All documents, or the first 20 that failed.")] = "failed",
) -> Response:
    """Show the progress of a job. `stage`, `done` and `total` are of the document being ingested, `counts` of all."""
    if documents == "all":
        found = await run_in_threadpool(engine_thread.jobs.get, found.id, documents)
    return JSONResponse(to_content(found, tenant))


@router.post("/v1/jobs/{job_id}/cancel", response_model=IngestJob, responses=PROBLEMS)
async def cancel(found: JobDep, engine_thread: EngineThreadDep, caller: CallerDep) -> Response:
    """Cancel a job. Queued documents are dropped, and the document being ingested stops at its next chunk. Documents
    that are done stay. A job that is done does not change."""
    cancelled = await run_in_threadpool(cancel_job_of, caller, found, engine_thread)
    return JSONResponse(to_content(cancelled, caller.tenant))


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=EventSourceResponse,
    responses=PROBLEMS,
    dependencies=[Depends(_watcher)],
)
async def events(
    found: JobDep, engine_thread: EngineThreadDep, tenant: TenantDep, request: Request
) -> AsyncIterator[ServerSentEvent]:
    """Follow a job: `progress` with the job whenever it changes, and at the end `done` with the finished job, or
    `error` with the problem that keeps the service from going on. If the stream ends without `done`, request it
    again."""
    sent: IngestJob | None = None
    try:
        while True:
            if found != sent:
                sent, name = found, "progress" if found.finished is None else "done"
                yield ServerSentEvent(data=to_content(found, tenant), event=name)
            if found.finished is not None:
                return
            engine_thread.check_ingest(found.id)
            await asyncio.sleep(EVENT_SECONDS)
            found = await run_in_threadpool(engine_thread.jobs.get, found.id, "failed")
    except Exception as error:
        yield ServerSentEvent(data=stream_fault(error).to_problem(request.state.request_id), event="error")
