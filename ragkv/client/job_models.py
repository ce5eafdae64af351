"""Jobs of an ingest as the client returns them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_IGNORE_EXTRA = ConfigDict(extra="ignore")


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class JobError:
    """The error of a job or of one of its documents.

    Attributes:
        code: Kind of error, in snake case.
        message: What happened.
    """

    code: str
    message: str


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class JobDocument:
    """A document of a job.

    Attributes:
        id: Id of the document.
        status: State of the document.
        error: Why it failed, or None.
    """

    id: str
    status: str
    error: JobError | None = None


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class JobCounts:
    """Number of documents of a job, by state.

    Attributes:
        total: All documents.
        done: Documents that no longer wait.
        completed: Documents that were ingested.
        unchanged: Documents whose content had not changed.
        failed: Documents that failed.
        cancelled: Documents that were cancelled.
    """

    total: int
    done: int
    completed: int
    unchanged: int
    failed: int
    cancelled: int


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Job:
    """An ingest job.

    Attributes:
        id: Id of the job.
        collection: Collection of its documents.
        status: State of the job.
        stage: Stage of the document that is being ingested.
        done: Progress of that stage.
        total: Size of that stage.
        counts: Number of documents, by state.
        documents: The first 20 failed documents, or all documents if requested.
        created: When the job was queued.
        updated: When the job last changed.
        eta_seconds: Estimated remaining seconds; None if unknown.
        error: Why the job failed, or None.
        last_error: Error of the latest failed attempt, or None.
        started: When the job started, or None.
        finished: When the job ended, or None.
    """

    id: str
    collection: str
    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    stage: str
    done: int
    total: int
    counts: JobCounts
    documents: tuple[JobDocument, ...]
    created: float
    updated: float
    eta_seconds: float | None = None
    error: JobError | None = None
    last_error: JobError | None = None
    started: float | None = None
    finished: float | None = None
