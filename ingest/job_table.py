"""The tables of ingest jobs: every change of a job. `job_view` reads them.

    queued → running → completed | failed | cancelled    a document, and a job over its documents
                     → unchanged                         a document that was there with the same content

All functions run inside a transaction of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

from ragkv.catalog.transaction import Transaction
from ragkv.ingest import job_statements as sql
from ragkv.ingest import leases
from ragkv.ingest.job_view import ACTIVE, DocumentStatus, JobFault
from ragkv.ingest.leases import JobPlace
from ragkv.ingest.progress import IngestStep

MAX_ATTEMPTS = 2
"""Starts of one document after which it is taken to be what kills the process."""
KEPT_JOBS = 1000
"""Finished jobs that are kept."""

Wanted = Literal["wanted", "cancelled", "taken"]


def owner_of(collection: str) -> str:
    """Return the tenant that a collection of the catalogue belongs to; "" where there are no tenants."""
    tenant, colon, _ = collection.partition(":")
    return tenant if colon else ""


def insert(
    transaction: Transaction,
    job_id: str,
    collection: str,
    digest: str,
    entries: Sequence[dict[str, str | None]],
    subject: str = "",
) -> str:
    """Queue a job. Returns its id, or that of a job that already waits with the same documents and nothing newer."""
    ids = transaction.array(entry["id"] for entry in entries)
    waiting = transaction.execute(sql.LATEST, {"of": collection, "ids": ids}).fetchone()
    if waiting and waiting[1] == digest:
        return str(waiting[0])
    now = time.time()
    state = {"status": "queued", "stage": "", "done": 0, "total": 0, "created": now, "updated": now}
    job = transaction.scalar(sql.INSERT_JOB, {"id": job_id, "collection": collection, "digest": digest, **state})
    documents = [
        {
            "job": job,
            "position": position,
            "id": entry["id"],
            "status": entry["status"],
            "error_code": entry["code"],
            "error_message": entry["message"],
            "payload": entry["payload"],
        }
        for position, entry in enumerate(entries)
    ]
    transaction.execute_all(sql.INSERT_DOCUMENT, documents)
    if subject:
        transaction.execute(sql.INSERT_SENDER, {"job": job, "subject": subject})
    _finish_job(transaction, job)
    transaction.execute(sql.FORGET, {"last": transaction.scalar(sql.LAST_ROW) - KEPT_JOBS})
    return job_id


def requeue(transaction: Transaction, place: JobPlace, worker: str) -> None:
    """Queue a document again that the worker runs. That start does not count as an attempt."""
    _touch(transaction, place.job)
    if transaction.execute(sql.REQUEUE, {"of": place.job, "at": place.position, "by": worker}).rowcount:
        leases.drop(transaction, place)
        _queue_job(transaction, place.job)


def complete(
    transaction: Transaction, place: JobPlace, worker: str, status: DocumentStatus, error: JobFault | None
) -> None:
    """Record the outcome of a document that the worker runs."""
    _touch(transaction, place.job)
    outcome = {"status": status, "error_code": error.code if error else None}
    outcome["error_message"] = error.message if error else None
    if transaction.execute(sql.COMPLETE, {"of": place.job, "at": place.position, "by": worker, **outcome}).rowcount:
        leases.drop(transaction, place)
        _finish_job(transaction, place.job)


def record_pace(transaction: Transaction, place: JobPlace, seconds: float) -> None:
    """Add the time of one document to the running mean of the job."""
    transaction.execute(sql.PACE, {"job": place.job, "seconds": seconds})


def is_wanted(transaction: Transaction, place: JobPlace, worker: str) -> Wanted:
    """Whether the worker is to go on with a document.

    Returns:
        `cancelled` if it was cancelled or withdrawn, `taken` if the worker has lost its lease.
    """
    status, holder = transaction.execute(sql.STATUS, {"of": place.job, "at": place.position}).fetchone() or (None, None)
    if status == "running" and holder == worker:
        return "wanted"
    return "cancelled" if status in (None, "cancelled") else "taken"


def record_progress(transaction: Transaction, place: JobPlace, step: IngestStep, rest: float | None) -> None:
    """Record how far the running document is. rest: seconds it still needs; None while that is not known."""
    progress = {"stage": step.stage, "done": step.done, "total": step.total, "updated": time.time()}
    transaction.execute(sql.UPDATE_JOB, {"of": place.job, **progress})
    transaction.execute(sql.REST, {"job": place.job, "rest": rest})


def cancel(transaction: Transaction, job_id: str) -> None:
    """Cancel the documents that a job has not finished."""
    job = transaction.scalar(sql.ROW_OF, {"named": job_id})
    if job is not None and _cancel_unfinished(transaction, sql.IN_JOB, {"of": job}):
        transaction.execute(sql.UPDATE_JOB, {"of": job, "status": "cancelled"})


def withdraw(transaction: Transaction, collection: str, document_id: str) -> bool:
    """Cancel a document in every job that has not finished it or failed at it. Returns whether there was one."""
    parameters = {"of": collection, "named": document_id}
    failed = transaction.execute(sql.OF_NAME.failed, parameters).rowcount
    return _cancel_unfinished(transaction, sql.OF_NAME, parameters) or failed > 0


def abandon(transaction: Transaction, collection: str) -> bool:
    """Cancel all that waits for a collection. Returns whether anything did."""
    return _cancel_unfinished(transaction, sql.IN_COLLECTION, {"of": collection})


def waits(transaction: Transaction, collection: str, document_id: str) -> bool:
    """Whether a version of the document is still to be ingested."""
    return transaction.execute(sql.WAITS, {"of": collection, "named": document_id}).fetchone() is not None


def recover(transaction: Transaction, worker: str = "", held: Collection[JobPlace] | None = None) -> int:
    """Queue again what is lost, and fail what killed a process too often. Returns how many are queued again.

    The transaction must be alone. worker, held: as of `leases.lost`.
    """
    told = f"set aside: the process died {MAX_ATTEMPTS} times while reading this document"
    again, touched = 0, dict[int, None]()
    for place, attempts, died in leases.lost(transaction, worker, held):
        which = {"of": place.job, "at": place.position}
        if died and attempts >= MAX_ATTEMPTS:
            fault = {"error_code": "interrupted", "error_message": told, "payload": None}
            transaction.execute(sql.LOSE, {**which, "status": "failed", **fault})
        else:
            counted = attempts if died else attempts - 1
            again += transaction.execute(sql.LOSE, {**which, "status": "queued", "attempts": counted}).rowcount
        leases.drop(transaction, place)
        touched[place.job] = None
    for job in touched:
        _queue_job(transaction, job)
        _finish_job(transaction, job)
    return again


def forget_set_aside(transaction: Transaction) -> int:
    """Cancel what was set aside, so that nothing tells of it any more. Returns how many documents there were."""
    count: int = transaction.execute(sql.FORGET_SET_ASIDE).rowcount
    return count


def job_of(transaction: Transaction, place: JobPlace) -> tuple[str, str]:
    """Return the id of the document's job, and who sent it; "" if that is not known."""
    job_id, subject = transaction.execute(sql.SENT, {"of": place.job}).fetchone()
    return job_id, subject


def is_finished(transaction: Transaction, place: JobPlace) -> bool:
    """Whether the document's job is finished."""
    return transaction.scalar(sql.FINISHED, {"of": place.job}) is not None


def _touch(transaction: Transaction, job: int) -> None:
    """Write the row of a job first, so that of two processes that end its documents, the second sees the first's."""
    transaction.execute(sql.UPDATE_JOB, {"of": job, "updated": time.time()})


def _queue_job(transaction: Transaction, job: int) -> None:
    """Record that a job waits, if none of its documents runs."""
    if "running" not in _statuses(transaction, job):
        transaction.execute(sql.QUEUE_JOB, {"of": job})


def _cancel_unfinished(transaction: Transaction, which: sql.Unfinished, parameters: dict[str, Any]) -> bool:
    """Cancel the unfinished documents that are selected. Returns whether there were any."""
    found = transaction.execute(which.jobs, parameters).fetchall()
    if found:
        transaction.execute(which.leases, parameters)
        transaction.execute(which.cancel, parameters)
    for (job,) in found:
        _finish_job(transaction, job)
    return bool(found)


def _statuses(transaction: Transaction, job: int) -> set[str]:
    return {status for (status,) in transaction.execute(sql.STATUSES, {"of": job})}


def _finish_job(transaction: Transaction, job: int) -> None:
    """Finish the job when none of its documents is queued or running."""
    statuses = _statuses(transaction, job)
    if statuses & set(ACTIVE):
        return
    status, error = "failed", (None, None)
    if statuses & {"completed", "unchanged"}:
        status = "completed"
    elif "cancelled" in statuses:
        status = "cancelled"
    else:
        error = transaction.execute(sql.FIRST_ERROR, {"of": job}).fetchone()
    now = time.time()
    fault = {"error_code": error[0], "error_message": error[1]}
    transaction.execute(sql.FINISH_JOB, {"of": job, "status": status, **fault, "updated": now, "finished": now})
