"""Ingest jobs. A table in the catalogue is the truth, a thread of each process takes documents from it, and a crash
loses nothing.

A process holds a lease on each document that it ingests (leases.py), so no other takes the same one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from ragkv.catalog import Catalog
from ragkv.catalog.database import again_with_room
from ragkv.catalog.limits import MAX_NAME
from ragkv.errors import CatalogCorrupt, InputError, OutOfMemory, RagkvError, StoreUnavailable, is_out_of_memory
from ragkv.ingest import job_queue, job_table, job_view, leases
from ragkv.ingest.document_ids import Rejected
from ragkv.ingest.engine_contract import IngestEngine
from ragkv.ingest.job_queue import StartedDocument, WaitingJob
from ragkv.ingest.job_view import (
    Backlog,
    Counts,
    DocumentOutcome,
    DocumentStatus,
    IngestJob,
    JobEntry,
    JobFault,
    Listed,
    SetAside,
    Status,
    ignore_outcome,
)
from ragkv.ingest.leases import JobPlace, LeaseKeeper
from ragkv.ingest.loader import checked
from ragkv.ingest.outcomes import IngestOutcome
from ragkv.ingest.pipeline import ingest_steps
from ragkv.ingest.progress import ENDS, IngestStep, Paused
from ragkv.types import Document

__all__ = [
    "Backlog",
    "Counts",
    "DocumentOutcome",
    "IngestJob",
    "JobEntry",
    "JobFault",
    "Jobs",
    "Listed",
    "SetAside",
    "Status",
    "code_of",
]

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.25
"""Least time between two writes of a job's progress."""
RECLAIM_SECONDS = 2.0
"""Least time between two looks at what dead processes left behind."""


class Jobs:
    """The jobs of a catalogue. Thread-safe, except that `steps` belongs to the thread that owns the engine.

    `on_outcome` is called with what came of each document.

    Attributes:
        submitted: Counts the jobs that were submitted.
    """

    def __init__(
        self, catalog: Catalog, max_document_bytes: int, on_outcome: Callable[[DocumentOutcome], None] = ignore_outcome
    ):
        self._catalog, self._on_outcome = catalog, on_outcome
        self._limit = max_document_bytes
        self._pausing, self._dying = threading.Event(), False
        self._leases, self._reclaimed = LeaseKeeper(catalog), 0.0
        self.submitted = 0
        self._ended: dict[int, float] = {}
        self._unrecorded: list[tuple[JobPlace, DocumentStatus, JobFault | None]] = []

    @again_with_room
    def submit(self, items: Sequence[Document | Rejected], collection: str | None = None, subject: str = "") -> str:
        """Queue documents of one collection and return the job's id.

        A document that cannot be ingested fails in the job; the others go on. Where the same documents already wait,
        with nothing newer behind them, the id of that job is returned.

        Args:
            items: The documents, and files that the loader rejected.
            collection: Their collection. None takes the documents' own, or `default` where all were rejected.
            subject: Who sends them; "" if that is not known.

        Raises:
            InputError: There are no items, or they belong to several collections.
        """
        collections = {item.collection for item in items if isinstance(item, Document)}
        collections |= {collection} if collection is not None else set()
        if not items or len(collections) > 1:
            raise InputError("a job needs documents, all of one collection")
        collection = _storable(collections.pop() if collections else "default")
        entries = [_entry(item, self._limit) for item in items]
        content = json.dumps([collection, entries], sort_keys=True).encode()
        digest = hashlib.sha256(content).hexdigest()
        with self._catalog.write(size=2 * len(content)) as transaction:
            job_id = job_table.insert(transaction, uuid.uuid4().hex, collection, digest, entries, subject)
        self.submitted += 1
        for entry in entries:
            if entry["status"] == "failed":
                result = f"failed: {entry['code']}"
                self._tell(DocumentOutcome(job_id, subject, collection, str(entry["id"]), result))
        return job_id

    def get(self, job_id: str, listed: Listed = "all") -> IngestJob:
        """Return a job. `listed` selects the documents that come with it. Raises NotFound."""
        with self._catalog.read() as transaction:
            return job_view.get(transaction, job_id, listed)

    def recent(
        self, limit: int = 50, prefix: str = "", status: Status | None = None, listed: Listed = "failed"
    ) -> list[IngestJob]:
        """Return the latest jobs, newest first.

        Args:
            limit: Most jobs.
            prefix: What the name of their collection starts with.
            status: Only jobs of this status; None for all.
            listed: Which of their documents come with them.
        """
        with self._catalog.read() as transaction:
            return job_view.recent(transaction, limit, prefix, status, listed)

    def backlog(self) -> Backlog:
        """Count what waits in all collections."""
        with self._catalog.read() as transaction:
            return job_view.backlog(transaction)

    @again_with_room
    def cancel(self, job_id: str, listed: Listed = "all") -> IngestJob:
        """Stop a job. Waiting documents are dropped, and those that run stop at their next step.

        Documents that are in the catalogue stay there, and so does one that is being committed at this moment.

        Raises:
            NotFound: There is no such job.
        """
        with self._catalog.write() as transaction:
            job_table.cancel(transaction, job_id)
        return self.get(job_id, listed)

    @again_with_room
    def withdraw(self, collection: str, document_id: str) -> bool:
        """Drop a deleted document from all jobs, so that none brings it back.

        Returns:
            Whether a job would have ingested it, or had failed to.
        """
        with self._catalog.write() as transaction:
            return job_table.withdraw(transaction, collection, document_id)

    @again_with_room
    def abandon(self, collection: str) -> bool:
        """Drop all that waits for a deleted collection. Returns whether anything did."""
        with self._catalog.write() as transaction:
            return job_table.abandon(transaction, collection)

    def waits(self, collection: str, document_id: str) -> bool:
        """Whether a version of the document is still to be ingested."""
        with self._catalog.read() as transaction:
            return job_table.waits(transaction, collection, document_id)

    @again_with_room
    def recover(self) -> int:
        """Queue again what no process ingests any more. Returns how many. Call it before `steps`, after a death too.

        What another living process ingests stays with it. What was in work when processes died MAX_ATTEMPTS times is
        set aside.
        """
        self._dying = False
        with self._catalog.write() as transaction:
            return job_table.recover(transaction, self._leases.worker)

    def _reclaim(self) -> None:
        """Queue again what died with other processes since the last look."""
        now = time.monotonic()
        if now - self._reclaimed < RECLAIM_SECONDS:
            return
        self._reclaimed = now
        with self._catalog.read() as transaction:
            lost = leases.lost(transaction)
        if lost:
            with self._catalog.write() as transaction:
                again = job_table.recover(transaction)
            logger.info("%d documents are queued again: another process did not finish them", again)

    @contextmanager
    def counting_deaths(self) -> Iterator[None]:
        """Treat what nobody expects as the death of the process: what is in work then stays so until `recover`.

        So a document that ends whoever reads it is given up, however it does that.
        """
        try:
            yield
        except (RagkvError, GeneratorExit):
            raise
        except BaseException:
            self._dying = True
            raise

    def set_aside(self) -> list[SetAside]:
        """Return the documents that were set aside, the earliest first."""
        with self._catalog.read() as transaction:
            return job_view.set_aside(transaction)

    def forget_set_aside(self) -> int:
        """Remove the documents that were set aside. Returns how many there were."""
        with self._catalog.write() as transaction:
            return job_table.forget_set_aside(transaction)

    def pause(self) -> None:
        """Stop the running document at its next step and queue it again; `steps` then takes no other. For shutdown."""
        self._pausing.set()

    @property
    def pausing(self) -> bool:
        """Whether `pause` was called."""
        return self._pausing.is_set()

    def waiting(self) -> list[WaitingJob]:
        """Return the jobs that have a document to start, the earliest first; none after `pause`."""
        if self._pausing.is_set():
            return []
        self._reclaim()
        with self._catalog.read() as transaction:
            return job_queue.waiting(transaction)

    def steps(self, engine: IngestEngine, job: int | None = None) -> Generator[IngestStep, None, str | None]:
        """Ingest the next waiting document of a job, one unit of work at a time.

        Between two steps the engine is free for other work. A fault of the document is recorded in the job. `pause`
        and closing the generator queue the document again and keep its KV; a cancelled document stops at the next
        step and its KV is evicted. `IngestTurns` (turns.py) decides whose turn it is.

        Args:
            engine: The engine that encodes.
            job: Row of the job; None: the earliest that has a document to start.

        Yields:
            Each step before the document is committed.

        Returns:
            The id of the document's job; None when nothing waits.

        Raises:
            StoreFull: The disk is full, so that not even a fault can be recorded. Call again later.
            StoreUnavailable: The catalogue cannot be read or written. The document is queued again. Call again later.
            CatalogCorrupt: The catalogue is damaged.
        """
        self._record_outcomes()
        started = self._start_next(job)
        if started is None:
            return None
        place, document = started.place, started.document
        with self._catalog.read() as transaction:
            job_id, subject = job_table.job_of(transaction, place)
        checkpoint = _Checkpoint(self._catalog, (place, self._leases.worker), self._pausing)
        self._leases.hold(place)
        try:
            result = yield from self._document_steps(engine, started, job_id, checkpoint)
        finally:
            self._leases.let_go(place)
        if result is not None:
            self._tell(DocumentOutcome(job_id, subject, document.collection, document.id, result))
        self._record_outcomes(self._seconds_alone(place.job, checkpoint.started))
        self._save_if_finished(engine, place)
        return job_id

    def _document_steps(
        self, engine: IngestEngine, started: StartedDocument, job_id: str, checkpoint: _Checkpoint
    ) -> Generator[IngestStep, None, str | None]:
        """Ingest a document as `steps` says. Returns what came of it (`DocumentOutcome`); None if it was paused."""
        place, document, fault = started
        if fault is not None:
            logger.warning("document %r of collection %r is %s", document.id, document.collection, fault.message)
            self._unrecorded.append((place, "failed", fault))
            return f"failed: {fault.code}"
        try:
            outcome = yield from _checked_steps(engine, document, checkpoint)
            self._unrecorded.append((place, "unchanged" if outcome.status == "unchanged" else "completed", None))
            return outcome.status
        except (Paused, GeneratorExit) as stop:
            if not self._dying:
                with self._catalog.write(alone=False) as transaction:
                    job_table.requeue(transaction, place, self._leases.worker)
            if isinstance(stop, GeneratorExit):
                raise
            return None
        except _Cancelled:
            return "cancelled"
        except CatalogCorrupt:
            raise
        except StoreUnavailable:  # of the catalogue, for a fault of the KV store costs only time
            self._unrecorded.append((place, "queued", None))
            raise
        except ENDS:
            raise
        except BaseException as error:
            fault = _fault_of(error, document.id, job_id)
            self._unrecorded.append((place, "failed", fault))
            return f"failed: {fault.code}"

    def _save_if_finished(self, engine: IngestEngine, place: JobPlace) -> None:
        """Write the index out when the document's job is finished. A fault only makes the next start slower."""
        with self._catalog.read() as transaction:
            finished = job_table.is_finished(transaction, place)
        if finished:
            self._ended.pop(place.job, None)
            try:
                engine.retriever.save()
            except Exception:
                logger.warning("the index was not saved", exc_info=True)

    def _tell(self, outcome: DocumentOutcome) -> None:
        """Tell what came of a document. A fault of who is told is none of the document."""
        try:
            self._on_outcome(outcome)
        except Exception:
            logger.exception("the outcome of document %r was not told", outcome.document_id)

    def _seconds_alone(self, job: int, started: float) -> float:
        """Return the time of a document that ends now, without that of documents of its job that ended meanwhile."""
        now = time.monotonic()
        before, self._ended[job] = self._ended.get(job, 0.0), now
        return now - max(started, before)

    def _start_next(self, job: int | None) -> StartedDocument | None:
        if self._pausing.is_set():
            return None
        with self._catalog.write(alone=False, durable=False) as transaction:
            return job_queue.start_next(transaction, self._leases.worker, job)

    def _record_outcomes(self, seconds: float | None = None) -> None:
        """Record the outcomes of documents, also those that a full disk kept from being recorded earlier.

        seconds: the time that the last of them took, without that of others of its job.
        """
        while self._unrecorded:
            place, status, fault = self._unrecorded[0]
            with self._catalog.write(alone=False, durable=False) as transaction:
                if status == "queued":
                    job_table.requeue(transaction, place, self._leases.worker)
                else:
                    job_table.complete(transaction, place, self._leases.worker, status, fault)
                if seconds is not None and len(self._unrecorded) == 1:
                    job_table.record_pace(transaction, place, seconds)
            self._unrecorded.pop(0)


class _Cancelled(Exception):
    """The running document is no longer wanted."""


class _Checkpoint:
    """Called between two steps of a document: stops the work where it must stop, and records the progress.

    Attributes:
        started: When the document was started, on the monotonic clock.
    """

    def __init__(self, catalog: Catalog, held: tuple[JobPlace, str], pausing: threading.Event):
        """Take the catalogue, the document and who holds its lease, and what is set when the work is to stop."""
        self._catalog, self._pausing = catalog, pausing
        self._place, self._worker = held
        self._stage = ""
        self.started = self._stage_started = self._written = time.monotonic()

    def check_wanted(self) -> None:
        """Raise _Cancelled when the document is no longer wanted, Paused when another process has taken it over."""
        with self._catalog.read() as transaction:
            found = job_table.is_wanted(transaction, self._place, self._worker)
        if found == "taken":
            raise Paused
        if found == "cancelled":
            raise _Cancelled

    def __call__(self, step: IngestStep) -> None:
        """Raise _Cancelled or Paused, else record the step."""
        self.check_wanted()
        if self._pausing.is_set():
            raise Paused
        now = time.monotonic()
        entered = step.stage != self._stage
        if entered:
            self._stage, self._stage_started = step.stage, now
        # Each write waits for the disk. A small document is encoded before anybody could see its other stages.
        if (entered and step.stage == "encode") or now - self._written >= REPORT_SECONDS:
            self._written = now
            with self._catalog.write(alone=False, durable=False) as transaction:
                job_table.record_progress(transaction, self._place, step, self._seconds_left(step))

    def _seconds_left(self, step: IngestStep) -> float | None:
        """Estimate the rest of the document, nearly all of which is encoding; None before any chunk is encoded."""
        if step.stage != "encode" or not step.done:
            return None
        return (step.total - step.done) * (time.monotonic() - self._stage_started) / step.done


def _checked_steps(
    engine: IngestEngine, document: Document, checkpoint: _Checkpoint
) -> Generator[IngestStep, None, IngestOutcome]:
    """Yield the steps of an ingest up to the commit, with a checkpoint after each.

    What stops the work here is thrown into the ingest, which decides whether its KV is kept.
    """
    steps = ingest_steps(engine, document, checkpoint.check_wanted)
    try:
        step = next(steps)
        while True:
            try:
                if step.stage != "index":  # at `index` the document is committed, and it is too late to stop
                    yield step
                    checkpoint(step)
            except BaseException as stop:
                step = steps.throw(stop)
            else:
                step = next(steps)
    except StopIteration as end:
        outcome: IngestOutcome = end.value
        return outcome


def _fault_of(error: BaseException, document_id: str, job_id: str) -> JobFault:
    """Return the fault to record. An unexpected error goes to the log; the fault does not show its message."""
    if is_out_of_memory(error):
        logger.warning("document %r of job %s: %s", document_id, job_id, OutOfMemory())
        return JobFault(code_of(OutOfMemory), str(OutOfMemory()))
    if isinstance(error, RagkvError):
        if error.public != error.message:
            logger.error("document %r of job %s: %s", document_id, job_id, error)
        return JobFault(code_of(type(error)), error.public)
    logger.error("document %r of job %s", document_id, job_id, exc_info=error)
    return JobFault("internal_error", f"{type(error).__name__} while reading the document; see the log")


def _entry(item: Document | Rejected, limit: int) -> dict[str, str | None]:
    """Return the table row of a submitted document."""
    row: dict[str, str | None] = {"status": "queued", "code": None, "message": None, "payload": None}
    try:
        if isinstance(item, Rejected):
            raise item.error
        item = checked(item, limit)
    except InputError as error:
        name = item.source if isinstance(item, Rejected) else item.id
        return {
            **row,
            "id": _storable(name),
            "status": "failed",
            "code": code_of(type(error)),
            "message": _storable(error.public),
        }
    more = [item.pages, item.source] if item.source else [item.pages] if item.pages else []
    return {**row, "id": item.id, "payload": json.dumps([item.title, item.text, dict(item.metadata), *more])}


def code_of(kind: type[Exception]) -> str:
    """Name a kind of error as `JobFault.code` does, in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _storable(name: str) -> str:
    """Escape and shorten a text so that the table can hold it, whatever a file was called."""
    return name.encode(errors="backslashreplace").decode()[: 4 * MAX_NAME]
