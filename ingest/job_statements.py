"""Statements on the tables of ingest jobs. `job_table` runs them.

Parameters: `of` is the row of a job, or a collection; `at` a position in the job; `by` a worker; `named` an id.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, bindparam, delete, exists, func, insert, or_, select, update

from ragkv.catalog.statements import one_of, upsert, values
from ragkv.catalog.tables import job_documents, job_senders, jobs, leases, paces
from ragkv.ingest.job_view import ACTIVE, SET_ASIDE

PACE_MEMORY = 0.1
"""Weight of the latest document in the running mean of the time that one takes."""

_EARLIER, _BEFORE = job_documents.alias("earlier"), jobs.alias("before")
_OLDER_VERSION = (
    select(1)
    .select_from(_EARLIER.join(_BEFORE, _BEFORE.c.row == _EARLIER.c.job))
    .where(
        _EARLIER.c.id == job_documents.c.id,
        one_of(_EARLIER.c.status, ACTIVE),
        _BEFORE.c.collection == jobs.c.collection,
        or_(
            _EARLIER.c.job < job_documents.c.job,
            (_EARLIER.c.job == job_documents.c.job) & (_EARLIER.c.position < job_documents.c.position),
        ),
    )
)
# The next document of a job. An older version of it that still waits, or runs, comes first. A row that another process
# is just taking is passed over.
NEXT = (
    select(
        *(job_documents.c.job, job_documents.c.position, jobs.c.collection),
        *(job_documents.c.id, job_documents.c.payload, job_documents.c.attempts),
    )
    .select_from(job_documents.join(jobs, jobs.c.row == job_documents.c.job))
    .where(job_documents.c.status == "queued", job_documents.c.job == bindparam("of"), ~exists(_OLDER_VERSION))
    .order_by(job_documents.c.position)
    .limit(1)
)
START_NEXT = NEXT.with_for_update(of=job_documents, skip_locked=True)
_QUEUED_OF = (
    select(1).select_from(job_documents).where(job_documents.c.job == jobs.c.row, job_documents.c.status == "queued")
)
WITH_QUEUED = (
    select(jobs.c.row, jobs.c.collection).where(one_of(jobs.c.status, ACTIVE), exists(_QUEUED_OF)).order_by(jobs.c.row)
)
LATEST = (
    select(jobs.c.id, jobs.c.digest)
    .select_from(jobs.join(job_documents, job_documents.c.job == jobs.c.row))
    .where(jobs.c.collection == bindparam("of"), one_of(jobs.c.status, ACTIVE))
    .where(job_documents.c.id.in_(select(values("ids", "text").c.value)))
    .order_by(jobs.c.row.desc())
    .limit(1)
)
INSERT_JOB, INSERT_DOCUMENT = insert(jobs).returning(jobs.c.row), insert(job_documents)
INSERT_SENDER = insert(job_senders)
LAST_ROW = select(func.max(jobs.c.row))
FORGET = delete(jobs).where(jobs.c.finished.is_not(None), jobs.c.row <= bindparam("last"))
_THIS = (job_documents.c.job == bindparam("of"), job_documents.c.position == bindparam("at"))
_MY_LEASE = exists(
    select(1)
    .select_from(leases)
    .where(
        leases.c.job == job_documents.c.job,
        leases.c.position == job_documents.c.position,
        leases.c.worker == bindparam("by"),
    )
)
_MINE = (*_THIS, job_documents.c.status == "running", _MY_LEASE)
START = update(job_documents).where(*_THIS).values(status="running", attempts=job_documents.c.attempts + 1)
REQUEUE = update(job_documents).where(*_MINE).values(status="queued", attempts=job_documents.c.attempts - 1)
COMPLETE = update(job_documents).where(*_MINE).values(payload=None)
LOSE = update(job_documents).where(*_THIS, job_documents.c.status == "running")
FORGET_SET_ASIDE = (
    update(job_documents)
    .where(job_documents.c.status == "failed", one_of(job_documents.c.error_code, SET_ASIDE))
    .values(status="cancelled")
)
_JOB = jobs.c.row == bindparam("of")
START_JOB = (
    update(jobs)
    .where(_JOB)
    .values(status="running", stage="", done=0, total=0, started=func.coalesce(jobs.c.started, bindparam("now")))
)
UPDATE_JOB = update(jobs).where(_JOB)
FINISH_JOB = update(jobs).where(_JOB, jobs.c.finished.is_(None))
QUEUE_JOB = FINISH_JOB.values(status="queued", stage="")
FORGET_REST = update(paces).where(paces.c.job == bindparam("of")).values(rest=None)
PACE = upsert(
    paces,
    ["job"],
    lambda new: {
        "seconds": func.coalesce(paces.c.seconds + PACE_MEMORY * (new.seconds - paces.c.seconds), new.seconds)
    },
)
REST = upsert(paces, ["job"], lambda new: {"rest": new.rest})
STATUS = (
    select(job_documents.c.status, leases.c.worker)
    .select_from(
        job_documents.outerjoin(
            leases,
            (leases.c.job == job_documents.c.job) & (leases.c.position == job_documents.c.position),
        )
    )
    .where(*_THIS)
)
ROW_OF = select(jobs.c.row).where(jobs.c.id == bindparam("named"))
WAITS = (
    select(1)
    .select_from(job_documents.join(jobs, jobs.c.row == job_documents.c.job))
    .where(job_documents.c.id == bindparam("named"), jobs.c.collection == bindparam("of"))
    .where(one_of(job_documents.c.status, ACTIVE))
    .limit(1)
)
SENT = (
    select(jobs.c.id, func.coalesce(job_senders.c.subject, ""))
    .select_from(jobs.outerjoin(job_senders, job_senders.c.job == jobs.c.row))
    .where(_JOB)
)
FINISHED = select(jobs.c.finished).where(_JOB)
STATUSES = select(job_documents.c.status).where(job_documents.c.job == bindparam("of")).distinct()
FIRST_ERROR = (
    select(job_documents.c.error_code, job_documents.c.error_message)
    .where(job_documents.c.job == bindparam("of"))
    .order_by(job_documents.c.position)
    .limit(1)
)


class Unfinished:
    """Statements on the unfinished documents that a condition selects."""

    def __init__(self, *condition: ColumnElement[bool]):
        unfinished = (*condition, one_of(job_documents.c.status, ACTIVE))
        self.jobs = select(job_documents.c.job).where(*unfinished).distinct()
        self.cancel = update(job_documents).where(*unfinished).values(status="cancelled", payload=None)
        self.leases = delete(leases).where(
            exists(
                select(1)
                .select_from(job_documents)
                .where(
                    job_documents.c.job == leases.c.job,
                    job_documents.c.position == leases.c.position,
                    *unfinished,
                )
            )
        )
        self.failed = (
            update(job_documents).where(*condition, job_documents.c.status == "failed").values(status="cancelled")
        )


_OF_COLLECTION = job_documents.c.job.in_(select(jobs.c.row).where(jobs.c.collection == bindparam("of")))
IN_JOB = Unfinished(job_documents.c.job == bindparam("of"))
IN_COLLECTION = Unfinished(_OF_COLLECTION)
OF_NAME = Unfinished(job_documents.c.id == bindparam("named"), _OF_COLLECTION)
