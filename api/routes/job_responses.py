"""Steps that the routes for documents share: wait for a job, and build the response."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ragkv.api.errors import error_response, fault_of_job
from ragkv.api.routes.dependencies import POLL_SECONDS
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.tenants import Tenant
from ragkv.ingest.jobs import IngestJob


async def wait_for_job(job_id: str, engine_thread: EngineThread, request: Request) -> IngestJob | None:
    """Wait until a job is finished. Return None if the client disconnects first.

    Raises:
        Stopping: The service stops first. The next start resumes the job.
        StoreFull: There is no space to go on.
        CatalogCorrupt: The catalogue is damaged.
    """
    while True:
        job = await run_in_threadpool(engine_thread.jobs.get, job_id, "failed")
        if job.finished is not None:
            return job
        engine_thread.check_ingest(job_id)
        if await request.is_disconnected():
            return None
        await asyncio.sleep(POLL_SECONDS)


def accepted(job_id: str) -> Response:
    """Build a 202 with the id and the address of the job."""
    return JSONResponse({"job_id": job_id}, 202, {"Location": f"/v1/jobs/{job_id}"})


def client_closed() -> Response:
    """Build a 499 for the log. The client has disconnected and does not read it."""
    return Response(status_code=499)


def done(job: IngestJob, tenant: Tenant, scope: Scope) -> Response:
    """Build the response to a request that waited for its job.

    It is 200 if every document is in, and the fault of the document if there is only one. If some of several documents
    are not in it is 207, and the job lists them with their faults.
    """
    if not job.counts.failed and not job.counts.cancelled:
        return JSONResponse(to_content(job, tenant))
    if job.counts.total == 1:
        return error_response(replace(fault_of_job(job.error), extra={"job_id": job.id}), scope)
    return JSONResponse(to_content(job, tenant), 207)


def to_content(job: IngestJob, tenant: Tenant) -> dict[str, Any]:
    """Convert a job to JSON with the tenant's own names of collections."""
    content = dataclasses.asdict(job) | {"collection": tenant.outside(job.collection)}
    for fault in (content["error"], content["last_error"], *(document["error"] for document in content["documents"])):
        if fault is not None:
            fault["message"] = tenant.told(fault["message"])
    return content
