"""Read ingest jobs from their tables: how far a job is, what failed, and when it will be done.

All functions run inside a transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import Select, bindparam, func, select

from ragkv.catalog.statements import one_of
from ragkv.catalog.tables import job_documents, jobs, paces
from ragkv.catalog.transaction import Transaction
from ragkv.errors import NotFound

FAILED_SHOWN = 20
"""Failed documents listed with a job. The cost of a look at a job must not grow with its documents."""

Status = Literal["queued", "running", "completed", "failed", "cancelled"]
DocumentStatus = Literal["queued", "running", "completed", "unchanged", "failed", "cancelled"]
Listed = Literal["all", "failed"]
"""Which documents are listed with a job: all of them, or the first FAILED_SHOWN that failed."""

ACTIVE = ("queued", "running")
SET_ASIDE = ("interrupted", "unreadable")
"""Codes of the faults of documents that were set aside: processes died with them, or the queue cannot tell them."""
_COLUMNS = (
    *("row", "id", "collection", "status", "stage", "done", "total", "error_code", "error_message"),
    *("created", "started", "updated", "finished"),
)
_JOBS = select(*(jobs.c[name] for name in _COLUMNS), paces.c.seconds, paces.c.rest).select_from(
    jobs.outerjoin(paces, paces.c.job == jobs.c.row)
)
_JOB = _JOBS.where(jobs.c.id == bindparam("named"))
_COUNTS = (
    select(job_documents.c.status, func.count())
    .where(job_documents.c.job == bindparam("of"))
    .group_by(job_documents.c.status)
)
_DOCUMENTS = select(
    job_documents.c.id, job_documents.c.status, job_documents.c.error_code, job_documents.c.error_message
).where(job_documents.c.job == bindparam("of"))
_ALL = _DOCUMENTS.order_by(job_documents.c.position)
_FAILED = _ALL.where(job_documents.c.status == "failed").limit(FAILED_SHOWN)
_LAST_FAILED = _DOCUMENTS.where(job_documents.c.status == "failed").order_by(job_documents.c.position.desc()).limit(1)
_SET_ASIDE = (
    select(jobs.c.id, jobs.c.collection, job_documents.c.id, job_documents.c.error_message, jobs.c.updated)
    .select_from(jobs.join(job_documents, job_documents.c.job == jobs.c.row))
    .where(job_documents.c.status == "failed", one_of(job_documents.c.error_code, SET_ASIDE))
    .order_by(jobs.c.row, job_documents.c.position)
)
_ACTIVE_JOBS = select(jobs.c.status, func.count()).where(one_of(jobs.c.status, ACTIVE)).group_by(jobs.c.status)
_WAITING = (
    select(func.count())
    .select_from(jobs.join(job_documents, job_documents.c.job == jobs.c.row))
    .where(one_of(jobs.c.status, ACTIVE), job_documents.c.status == "queued")
)


@dataclass(frozen=True)
class JobFault:
    """Why a document or a job failed.

    Attributes:
        code: The kind of fault in snake case; `internal_error` for a bug of the service.
        message: What to show to the client.
    """

    code: str
    message: str


@dataclass(frozen=True)
class DocumentOutcome:
    """What came of a document of a job.

    Attributes:
        job_id: Id of the job.
        subject: Who sent the job; "" if that is not known.
        collection: Collection of the document.
        document_id: Its id.
        result: `added`, `replaced`, `unchanged`, `cancelled`, or `failed: CODE`.
    """

    job_id: str
    subject: str
    collection: str
    document_id: str
    result: str


def ignore_outcome(outcome: DocumentOutcome) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class JobEntry:
    """A document of a job.

    Attributes:
        id: Id of the document, or the name of a file that the loader rejected.
        status: `completed` means that it was ingested; `unchanged`, that it was there with the same content.
        error: Why it failed.
    """

    id: str
    status: DocumentStatus
    error: JobFault | None


@dataclass(frozen=True)
class Counts:
    """The documents of a job, counted by status.

    Attributes:
        total: All documents.
        done: Those that are completed, unchanged, failed or cancelled. The others wait or run.
        completed: Ingested.
        unchanged: There with the same content.
        failed: Not ingested because of a fault.
        cancelled: Not ingested because the client cancelled the job or removed the document.
    """

    total: int
    done: int
    completed: int
    unchanged: int
    failed: int
    cancelled: int


@dataclass(frozen=True)
class IngestJob:
    """The state of a job. Times are Unix seconds.

    Attributes:
        id: Id of the job.
        collection: Collection of its documents.
        status: `completed` means that at least one document is in the catalogue, `failed` that none is.
        stage: Stage of the running document (ingest.progress.Stage).
        done: Units of the stage that are done.
        total: Units of the stage.
        counts: The documents by status.
        eta_seconds: Seconds until the job is done at its present pace; None while that is not known.
        error: Why the first document failed, where the whole job failed.
        last_error: Why the latest failed document failed, also in a completed job.
        documents: The listed documents (see Listed).
        created: When it was submitted.
        started: When its first document was started.
        updated: When it last changed.
        finished: When it ended.
    """

    id: str
    collection: str
    status: Status
    stage: str
    done: int
    total: int
    counts: Counts
    eta_seconds: float | None
    error: JobFault | None
    last_error: JobFault | None
    documents: tuple[JobEntry, ...]
    created: float
    started: float | None
    updated: float
    finished: float | None


@dataclass(frozen=True)
class SetAside:
    """A document that was set aside, because it would end every process that reads it.

    Attributes:
        job_id: Id of its job.
        collection: Its collection.
        document_id: Its id.
        reason: Why.
        updated: When its job last changed, in Unix seconds.
    """

    job_id: str
    collection: str
    document_id: str
    reason: str
    updated: float


@dataclass(frozen=True)
class Backlog:
    """What waits to be ingested.

    Attributes:
        documents: Documents that are not started.
        queued: Jobs of which no document was started.
        running: Jobs that are under way.
    """

    documents: int
    queued: int
    running: int


def backlog(transaction: Transaction) -> Backlog:
    """Count what waits in all collections. It reads two indices, so finished jobs cost nothing."""
    by_status = dict(transaction.execute(_ACTIVE_JOBS).fetchall())
    documents: int = transaction.scalar(_WAITING)
    return Backlog(documents, by_status.get("queued", 0), by_status.get("running", 0))


def set_aside(transaction: Transaction) -> list[SetAside]:
    """Return what was set aside, the earliest first. It reads the documents of all jobs that are kept."""
    return [SetAside(*row) for row in transaction.execute(_SET_ASIDE)]


def get(transaction: Transaction, job_id: str, listed: Listed) -> IngestJob:
    """Return a job. Raises NotFound."""
    row = transaction.execute(_JOB, {"named": job_id}).fetchone()
    if row is None:
        raise NotFound(f"there is no job {job_id!r}")
    return _job(transaction, row, listed)


def recent(transaction: Transaction, limit: int, prefix: str, status: Status | None, listed: Listed) -> list[IngestJob]:
    """Return the latest jobs, newest first. See `Jobs.recent`."""
    parameters = {"prefix": prefix, "most": limit} | ({} if status is None else {"having": status})
    found = transaction.execute(_recent(status is not None), parameters).fetchall()
    return [_job(transaction, row, listed) for row in found]


@lru_cache
def _recent(of_status: bool) -> Select[Any]:
    """Select the latest jobs; of_status: only those of one status."""
    mine = func.substr(jobs.c.collection, 1, func.length(bindparam("prefix"))) == bindparam("prefix")
    found = _JOBS.where(mine)
    if of_status:
        found = found.where(jobs.c.status == bindparam("having"))
    return found.order_by(jobs.c.row.desc()).limit(bindparam("most"))


def _job(transaction: Transaction, row: Sequence[Any], listed: Listed) -> IngestJob:
    key, job_id, collection, status, stage, done, total, code, message, *times, seconds, rest = row
    by_status = dict(transaction.execute(_COUNTS, {"of": key}))
    ended = {each: by_status.get(each, 0) for each in ("completed", "unchanged", "failed", "cancelled")}
    counts = Counts(sum(by_status.values()), sum(ended.values()), **ended)
    eta = _eta(by_status.get("queued", 0), seconds, rest) if status == "running" else None
    last = transaction.execute(_LAST_FAILED, {"of": key}).fetchone()
    errors = (_error(code, message), _error(last[2], last[3]) if last else None)
    documents = _documents(transaction, key, listed)
    return IngestJob(job_id, collection, status, stage, done, total, counts, eta, *errors, documents, *times)


def _documents(transaction: Transaction, job: int, listed: Listed) -> tuple[JobEntry, ...]:
    found = transaction.execute(_ALL if listed == "all" else _FAILED, {"of": job})
    return tuple(JobEntry(d[0], d[1], _error(d[2], d[3])) for d in found)


def _eta(waiting: int, seconds: float | None, rest: float | None) -> float | None:
    """Estimate the seconds until a job is done.

    Args:
        waiting: Documents that are queued.
        seconds: Mean time of one document; None while it is not known.
        rest: Time that the running document still needs; None while it is not known.
    """
    rest = seconds if rest is None else rest
    if rest is None or (waiting and seconds is None):
        return None
    return round(rest + waiting * (seconds or 0.0), 1)


def _error(code: object, message: object) -> JobFault | None:
    return JobFault(str(code), str(message)) if code else None
