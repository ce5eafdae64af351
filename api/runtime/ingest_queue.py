"""Queueing documents as a job, for all edges of the service."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.concurrency import run_in_threadpool

from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.errors import Stopping
from ragkv.ingest.document_ids import Rejected
from ragkv.types import Document


async def enqueue(
    items: Sequence[Document | Rejected], collection: str, engine_thread: EngineThread, caller: Caller
) -> str:
    """Enqueue documents of a collection as one job and return its id.

    Args:
        items: Documents, and files that could not be read.
        collection: Name of the collection in the catalogue.
        engine_thread: Runs the job.
        caller: Who sends them.

    Raises:
        Forbidden: The caller may only read.
        Stopping: The service is shutting down.
        InputError: The job is invalid.
    """
    ids = [item.source if isinstance(item, Rejected) else item.id for item in items]
    if not caller.writes:
        engine_thread.audit.record(caller, "ingest", "forbidden", ids, collection)
    caller.require_writer()
    if engine_thread.stopping:
        raise Stopping("the service is shutting down")

    def submit() -> str:
        job_id = engine_thread.jobs.submit(items, collection, caller.subject)
        engine_thread.audit.record(caller, "ingest", "accepted", ids, collection, job_id)
        return job_id

    job_id = await run_in_threadpool(submit)
    engine_thread.wake()
    return job_id
