"""What is sent becomes a job: it is queued, waited for where that is wanted, and shown."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from api.routes.dependencies import POLL_SECONDS
from api.runtime.engine_thread import EngineThread
from api.runtime.tenants import Tenant
from ingest.jobs import IngestJob
from ingest.loader import Rejected
from ragkv.errors import Stopping
from ragkv.types import Document


async def queue(items: Sequence[Document | Rejected], collection: str, worker: EngineThread) -> str:
    """Queue documents of a collection, as the catalogue calls it; returns the job's id. Raises Stopping, InputError."""
    if worker.stopping:
        raise Stopping("the service is shutting down")
    job_id = await run_in_threadpool(worker.jobs.submit, items, collection)
    worker.wake()
    return job_id


async def outcome(job_id: str, worker: EngineThread, request: Request) -> IngestJob | None:
    """The job once it is finished; None where the client has gone.

    Raises Stopping when the service ends first: the next start takes the job up.
    """
    while True:
        found = await run_in_threadpool(worker.jobs.get, job_id, "failed")
        if found.finished is not None:
            return found
        if worker.stopping:
            raise Stopping(f"the service is shutting down; job {job_id} goes on when it is back")
        if await request.is_disconnected():
            return None
        await asyncio.sleep(POLL_SECONDS)


def accepted(job_id: str) -> Response:
    """The job that was made, and where to look."""
    return JSONResponse({"job_id": job_id}, 202, {"Location": f"/v1/jobs/{job_id}"})


def gone() -> Response:
    """For a client that hung up; nobody reads it."""
    return Response(status_code=499)


def shown(job: IngestJob, tenant: Tenant) -> dict[str, Any]:
    """The job as its tenant sees it."""
    told = dataclasses.asdict(job) | {"collection": tenant.outside(job.collection)}
    for fault in (told["error"], told["last_error"], *(document["error"] for document in told["documents"])):
        if fault is not None:
            fault["message"] = tenant.told(fault["message"])
    return told
