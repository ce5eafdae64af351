"""Deleting documents and collections, and cancelling jobs, for all edges of the service: writers only, and audited."""

from __future__ import annotations

from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.catalog_service import not_found
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.errors import NotFound
from ragkv.ingest.jobs import IngestJob


def remove_document_of(caller: Caller, collection: str, document_id: str, engine_thread: EngineThread) -> None:
    """Remove a document of the caller's tenant, also one that is queued, being ingested or failed.

    Args:
        caller: Who asks for it.
        collection: Its collection, as the tenant names it.
        document_id: Its id.
        engine_thread: The engine's thread.

    Raises:
        Forbidden: The caller may only read.
        NotFound: There is no such document.
    """
    inside = caller.tenant.inside(collection)
    _require_writer(caller, "delete", inside, engine_thread, [document_id])
    try:
        engine_thread.catalog_service.remove(inside, document_id)
    except NotFound:
        raise not_found(document_id, collection) from None
    engine_thread.audit.record(caller, "delete", "deleted", [document_id], inside)
    engine_thread.wake()


def remove_collection_of(caller: Caller, collection: str, engine_thread: EngineThread) -> None:
    """Remove a collection of the caller's tenant: its documents, queued jobs and conversations.

    Args:
        caller: Who asks for it.
        collection: The collection, as the tenant names it.
        engine_thread: The engine's thread.

    Raises:
        Forbidden: The caller may only read.
        NotFound: There is no such collection.
    """
    inside = caller.tenant.inside(collection)
    _require_writer(caller, "delete_collection", inside, engine_thread)
    try:
        engine_thread.catalog_service.remove_collection(inside)
    except NotFound:
        raise NotFound(f"there is no collection {collection!r}") from None
    engine_thread.audit.record(caller, "delete_collection", "deleted", collection=inside)
    engine_thread.wake()


def cancel_job_of(caller: Caller, job: IngestJob, engine_thread: EngineThread) -> IngestJob:
    """Cancel a job and return it. See `Jobs.cancel`. Raises Forbidden or NotFound."""
    _require_writer(caller, "cancel", job.collection, engine_thread)
    cancelled = engine_thread.jobs.cancel(job.id, "failed")
    engine_thread.audit.record(caller, "cancel", cancelled.status, collection=job.collection, job_id=job.id)
    return cancelled


def _require_writer(
    caller: Caller, action: str, collection: str, engine_thread: EngineThread, documents: list[str] | None = None
) -> None:
    if not caller.writes:
        engine_thread.audit.record(caller, action, "forbidden", documents or (), collection)
    caller.require_writer()
