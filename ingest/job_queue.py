"""Which document is next: the waiting jobs, and taking a document from them."""

from __future__ import annotations

import json
import time
from base64 import b64decode
from collections import Counter
from typing import NamedTuple

from ragkv.catalog.limits import MAX_DEPTH, MAX_TITLE, is_deep
from ragkv.catalog.transaction import Transaction
from ragkv.errors import InvalidDocument
from ragkv.ingest import job_statements as sql
from ragkv.ingest import leases
from ragkv.ingest.job_table import owner_of
from ragkv.ingest.job_view import JobFault
from ragkv.ingest.leases import JobPlace
from ragkv.passages import shortened
from ragkv.types import Document

LOOKED_AT = 64
"""Jobs of one tenant that share its time; those behind them wait until one of these is done."""


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


class StartedDocument(NamedTuple):
    """A document that was taken from the queue.

    Attributes:
        place: Its row.
        document: The document; without content where that cannot be read.
        fault: Why it cannot be read.
    """

    place: JobPlace
    document: Document
    fault: JobFault | None


def waiting(transaction: Transaction) -> list[WaitingJob]:
    """Return the jobs that have a document to start, the earliest first; of one tenant at most LOOKED_AT."""
    found, looked = list[WaitingJob](), Counter[str]()
    for job, collection in transaction.execute(sql.WITH_QUEUED).fetchall():
        tenant = owner_of(collection)
        looked[tenant] += 1
        if looked[tenant] <= LOOKED_AT:
            row = transaction.execute(sql.NEXT, {"of": job}).fetchone()
            if row is not None:
                found.append(WaitingJob(job, collection, row[5]))
    return found


def start_next(transaction: Transaction, worker: str, job: int | None = None) -> StartedDocument | None:
    """Mark the next waiting document of a job as running, by `worker`, and return it; None when nothing waits.

    job: the row of the job; None: the earliest that has one.
    """
    if job is None:
        job = min((each.job for each in waiting(transaction)), default=None)
    row = None if job is None else transaction.execute(sql.START_NEXT, {"of": job}).fetchone()
    if row is None:
        return None
    place, now = JobPlace(row[0], row[1]), time.time()
    transaction.execute(sql.START, {"of": place.job, "at": place.position})
    transaction.execute(sql.START_JOB, {"of": place.job, "now": now, "updated": now})
    transaction.execute(sql.FORGET_REST, {"of": place.job})
    leases.take(transaction, place, worker)
    try:
        return StartedDocument(place, _document(*row[2:5]), None)
    except Exception as error:  # of whatever kind: another process would find the same content
        reason = (
            str(error) if isinstance(error, InvalidDocument) else f"its content in the queue: {type(error).__name__}"
        )
        return StartedDocument(
            place, Document(row[3], "", "", {}, row[2]), JobFault("unreadable", f"set aside: {reason}")
        )


def _document(collection: str, document_id: str, payload: str) -> Document:
    """Return a document of the queue. Raises what it raises to read what an earlier release accepted."""
    title, text, metadata, *more = json.loads(payload)  # what is empty at the end is left out
    if is_deep(metadata):
        raise InvalidDocument(f"its metadata is nested deeper than {MAX_DEPTH} levels")
    starts = tuple((offset, number) for offset, number in (more[0] if more else ()))
    source = more[1] if len(more) > 1 else ""
    file = b64decode(more[2]) if len(more) > 2 else b""
    return Document(document_id, shortened(title, MAX_TITLE), text, dict(metadata), collection, starts, source, file)
