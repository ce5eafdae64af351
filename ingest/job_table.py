"""The tables of ingest jobs: every change of a job. `job_view` reads them.

    queued → running → completed | failed | cancelled    a document, and a job over its documents
                     → unchanged                         a document that was there with the same content

All functions run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ingest.job_view import DocumentStatus, JobFault
from ingest.progress import IngestStep
from ragkv.types import Document

MAX_ATTEMPTS = 3
"""Starts of one document after which it is taken to be what kills the process."""
KEPT_JOBS = 1000
"""Finished jobs that are kept."""
LOOKED_AT = 64
"""Jobs of one tenant that share its time; those behind them wait until one of these is done."""
PACE_MEMORY = 0.1
"""Weight of the latest document in the running mean of the time that one takes."""

_ACTIVE = "('queued', 'running')"
_STARTABLE = f"""
SELECT job, position, collection, job_documents.id, payload, attempts FROM job_documents JOIN jobs ON row = job
WHERE job_documents.status = 'queued' AND job = ? AND NOT EXISTS (
    SELECT 1 FROM job_documents AS earlier JOIN jobs AS before ON before.row = earlier.job
    WHERE earlier.id = job_documents.id AND earlier.status IN {_ACTIVE} AND before.collection = jobs.collection
    AND (earlier.job < job_documents.job OR (earlier.job = job_documents.job
         AND earlier.position < job_documents.position)))
ORDER BY position LIMIT 1
"""
"""The next document of a job. An older version of it that still waits, or runs, comes first."""
_WITH_QUEUED = f"""
SELECT row, collection FROM jobs WHERE status IN {_ACTIVE} AND EXISTS (
    SELECT 1 FROM job_documents WHERE job = jobs.row AND status = 'queued') ORDER BY row
"""
_LATEST = f"""
SELECT jobs.id, jobs.digest FROM jobs JOIN job_documents ON jobs.row = job_documents.job
WHERE jobs.collection = ? AND jobs.status IN {_ACTIVE} AND job_documents.id IN (SELECT value FROM json_each(?))
ORDER BY jobs.row DESC LIMIT 1
"""


class JobPlace(NamedTuple):
    """The row of a document: its job, and its position in the job."""

    job: int
    position: int


class WaitingJob(NamedTuple):
    """A job that has a document to start.

    Attributes:
        job: Its row.
        collection: Collection of its documents.
        attempts: How often its next document was started in a process that died.
    """

    job: int
    collection: str
    attempts: int


def owner_of(collection: str) -> str:
    """Return the tenant that a collection of the catalogue belongs to; "" where there are no tenants."""
    tenant, colon, _ = collection.partition(":")
    return tenant if colon else ""


def insert(
    connection: sqlite3.Connection,
    job_id: str,
    collection: str,
    digest: str,
    entries: Sequence[dict[str, str | None]],
    subject: str = "",
) -> str:
    """Queue a job. Returns its id, or that of a job that already waits with the same documents and nothing newer."""
    ids = json.dumps([entry["id"] for entry in entries])
    waiting = connection.execute(_LATEST, (collection, ids)).fetchone()
    if waiting and waiting[1] == digest:
        return str(waiting[0])
    now = time.time()
    job = connection.execute(
        "INSERT INTO jobs (id, collection, digest, status, stage, done, total, created, updated)"
        " VALUES (?, ?, ?, 'queued', '', 0, 0, ?, ?)",
        (job_id, collection, digest, now, now),
    ).lastrowid
    connection.executemany(
        "INSERT INTO job_documents (job, position, id, status, error_code, error_message, payload)"
        " VALUES (:job, :position, :id, :status, :code, :message, :payload)",
        [{**entry, "job": job, "position": position} for position, entry in enumerate(entries)],
    )
    if subject:
        connection.execute("INSERT INTO job_senders (job, subject) VALUES (?, ?)", (job, subject))
    _finish_job(connection, job)
    sql = "DELETE FROM jobs WHERE finished IS NOT NULL AND row <= (SELECT max(row) FROM jobs) - ?"
    connection.execute(sql, (KEPT_JOBS,))
    return job_id


def waiting(connection: sqlite3.Connection) -> list[WaitingJob]:
    """Return the jobs that have a document to start, the earliest first; of one tenant at most LOOKED_AT."""
    found, looked = list[WaitingJob](), Counter[str]()
    for job, collection in connection.execute(_WITH_QUEUED).fetchall():
        tenant = owner_of(collection)
        looked[tenant] += 1
        if looked[tenant] <= LOOKED_AT and (row := _startable(connection, job)) is not None:
            found.append(WaitingJob(job, collection, row[5]))
    return found


def start_next(connection: sqlite3.Connection, job: int | None = None) -> tuple[JobPlace, Document] | None:
    """Mark the next waiting document of a job as running and return it; None when nothing waits.

    job: the row of the job; None: the earliest that has one.
    """
    if job is None:
        job = min((each.job for each in waiting(connection)), default=None)
    row = None if job is None else _startable(connection, job)
    if row is None:
        return None
    place, now = JobPlace(row[0], row[1]), time.time()
    sql = "UPDATE job_documents SET status = 'running', attempts = attempts + 1 WHERE job = ? AND position = ?"
    connection.execute(sql, place)
    sql = (
        "UPDATE jobs SET status = 'running', stage = '', done = 0, total = 0, started = coalesce(started, ?),"
        " updated = ? WHERE row = ?"
    )
    connection.execute(sql, (now, now, place.job))
    connection.execute("UPDATE paces SET rest = NULL WHERE job = ?", (place.job,))
    title, text, metadata, *pages = json.loads(row[4])  # a job that an older release queued has no pages
    starts = tuple((offset, number) for offset, number in (pages[0] if pages else ()))
    return place, Document(row[3], title, text, metadata, row[2], starts)


def _startable(connection: sqlite3.Connection, job: int) -> tuple[Any, ...] | None:
    found: tuple[Any, ...] | None = connection.execute(_STARTABLE, (job,)).fetchone()
    return found


def requeue(connection: sqlite3.Connection, place: JobPlace) -> None:
    """Queue a running document again. That start does not count as an attempt."""
    sql = (
        "UPDATE job_documents SET status = 'queued', attempts = attempts - 1"
        " WHERE job = ? AND position = ? AND status = 'running'"
    )
    connection.execute(sql, place)
    sql = "UPDATE jobs SET status = 'queued', stage = '' WHERE row = ? AND finished IS NULL"
    connection.execute(sql, (place.job,))


def complete(connection: sqlite3.Connection, place: JobPlace, status: DocumentStatus, error: JobFault | None) -> None:
    """Record the outcome of a running document."""
    facts = (status, error.code if error else None, error.message if error else None)
    sql = (
        "UPDATE job_documents SET status = ?, error_code = ?, error_message = ?, payload = NULL"
        " WHERE job = ? AND position = ? AND status = 'running'"
    )
    connection.execute(sql, (*facts, *place))
    connection.execute("UPDATE jobs SET updated = ? WHERE row = ?", (time.time(), place.job))
    _finish_job(connection, place.job)


def record_pace(connection: sqlite3.Connection, place: JobPlace, seconds: float) -> None:
    """Add the time of one document to the running mean of the job."""
    connection.execute(
        "INSERT INTO paces (job, seconds) VALUES (?, ?) ON CONFLICT (job) DO UPDATE"
        " SET seconds = coalesce(seconds + ? * (excluded.seconds - seconds), excluded.seconds)",
        (place.job, seconds, PACE_MEMORY),
    )


def is_running(connection: sqlite3.Connection, place: JobPlace) -> bool:
    """Whether the document is still to be ingested: it was neither cancelled nor withdrawn."""
    sql = "SELECT status FROM job_documents WHERE job = ? AND position = ?"
    row = connection.execute(sql, place).fetchone()
    return row is not None and row[0] == "running"


def record_progress(connection: sqlite3.Connection, place: JobPlace, step: IngestStep, rest: float | None) -> None:
    """Record how far the running document is. rest: seconds it still needs; None while that is not known."""
    sql = "UPDATE jobs SET stage = ?, done = ?, total = ?, updated = ? WHERE row = ?"
    connection.execute(sql, (step.stage, step.done, step.total, time.time(), place.job))
    sql = "INSERT INTO paces (job, rest) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET rest = excluded.rest"
    connection.execute(sql, (place.job, rest))


def cancel(connection: sqlite3.Connection, job_id: str) -> None:
    """Cancel the documents that a job has not finished."""
    found = connection.execute("SELECT row FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if found is not None and _cancel_unfinished(connection, "job = ?", found):
        connection.execute("UPDATE jobs SET status = 'cancelled' WHERE row = ?", found)


def withdraw(connection: sqlite3.Connection, collection: str, document_id: str) -> bool:
    """Cancel a document in every job that has not finished it or failed at it. Returns whether there was one."""
    which, arguments = "id = ? AND job IN (SELECT row FROM jobs WHERE collection = ?)", (document_id, collection)
    sql = f"UPDATE job_documents SET status = 'cancelled' WHERE {which} AND status = 'failed'"
    failed = connection.execute(sql, arguments).rowcount
    return _cancel_unfinished(connection, which, arguments) or failed > 0


def abandon(connection: sqlite3.Connection, collection: str) -> bool:
    """Cancel all that waits for a collection. Returns whether anything did."""
    return _cancel_unfinished(connection, "job IN (SELECT row FROM jobs WHERE collection = ?)", (collection,))


def waits(connection: sqlite3.Connection, collection: str, document_id: str) -> bool:
    """Whether a version of the document is still to be ingested."""
    sql = (
        "SELECT 1 FROM job_documents JOIN jobs ON row = job"
        f" WHERE job_documents.id = ? AND collection = ? AND job_documents.status IN {_ACTIVE}"
    )
    return connection.execute(sql, (document_id, collection)).fetchone() is not None


def recover(connection: sqlite3.Connection) -> int:
    """Queue again what was running, and fail what was started too often. Returns how many are queued again."""
    lost = f"not finished: the process died {MAX_ATTEMPTS} times while reading this document"
    connection.execute(
        "UPDATE job_documents SET status = 'failed', error_code = 'interrupted', error_message = ?, payload = NULL"
        " WHERE status = 'running' AND attempts >= ?",
        (lost, MAX_ATTEMPTS),
    )
    again = connection.execute("UPDATE job_documents SET status = 'queued' WHERE status = 'running'").rowcount
    for (job,) in connection.execute("SELECT row FROM jobs WHERE status = 'running'").fetchall():
        connection.execute("UPDATE jobs SET status = 'queued', stage = '' WHERE row = ?", (job,))
        _finish_job(connection, job)
    return again


def job_of(connection: sqlite3.Connection, place: JobPlace) -> tuple[str, str]:
    """Return the id of the document's job, and who sent it; "" if that is not known."""
    sql = "SELECT id, coalesce(subject, '') FROM jobs LEFT JOIN job_senders ON job = row WHERE row = ?"
    job_id, subject = connection.execute(sql, (place.job,)).fetchone()
    return job_id, subject


def is_finished(connection: sqlite3.Connection, place: JobPlace) -> bool:
    """Whether the document's job is finished."""
    sql = "SELECT finished FROM jobs WHERE row = ?"
    return connection.execute(sql, (place.job,)).fetchone()[0] is not None


def _cancel_unfinished(connection: sqlite3.Connection, which: str, arguments: Sequence[object]) -> bool:
    """Cancel the unfinished documents that the condition `which` selects. Returns whether there were any."""
    unfinished = f"{which} AND status IN {_ACTIVE}"
    jobs = connection.execute(f"SELECT DISTINCT job FROM job_documents WHERE {unfinished}", arguments).fetchall()
    connection.execute(f"UPDATE job_documents SET status = 'cancelled', payload = NULL WHERE {unfinished}", arguments)
    for (job,) in jobs:
        _finish_job(connection, job)
    return bool(jobs)


def _finish_job(connection: sqlite3.Connection, job: int | None) -> None:
    """Finish the job when none of its documents is queued or running."""
    sql = "SELECT DISTINCT status FROM job_documents WHERE job = ?"
    statuses = {status for (status,) in connection.execute(sql, (job,))}
    if statuses & {"queued", "running"}:
        return
    status, error = "failed", (None, None)
    if statuses & {"completed", "unchanged"}:
        status = "completed"
    elif "cancelled" in statuses:
        status = "cancelled"
    else:
        sql = "SELECT error_code, error_message FROM job_documents WHERE job = ? ORDER BY position LIMIT 1"
        error = connection.execute(sql, (job,)).fetchone()
    now = time.time()
    sql = (
        "UPDATE jobs SET status = ?, error_code = ?, error_message = ?, updated = ?, finished = ?"
        " WHERE row = ? AND finished IS NULL"
    )
    connection.execute(sql, (status, *error, now, now, job))
