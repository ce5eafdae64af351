"""Ingest jobs. A table in the catalogue is the truth, a thread of each process takes documents from it, and a crash
loses nothing. `submitted_jobs` has what needs no engine.

A process holds a lease on each document that it ingests (leases.py), so no other takes the same one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress

from ragkv.catalog import Catalog
from ragkv.catalog.database import again_with_room
from ragkv.errors import CatalogCorrupt, RagkvError, StoreFull, StoreUnavailable
from ragkv.ingest import job_queue, job_table, leases
from ragkv.ingest.engine_contract import IngestEngine
from ragkv.ingest.job_entries import fault_of
from ragkv.ingest.job_queue import StartedDocument, WaitingJob
from ragkv.ingest.job_steps import CancelledDocument, Checkpoint, checked_steps
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
from ragkv.ingest.progress import ENDS, IngestStep, Paused
from ragkv.ingest.submitted_jobs import SubmittedJobs

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
]

logger = logging.getLogger(__name__)

RECLAIM_SECONDS = 2.0
"""Least time between two looks at what dead processes left behind."""


class Jobs(SubmittedJobs):
    """The jobs of a catalogue, and who works on them. Thread-safe, except that `steps` belongs to the thread that owns
    the engine."""

    def __init__(
        self, catalog: Catalog, max_document_bytes: int, on_outcome: Callable[[DocumentOutcome], None] = ignore_outcome
    ):
        """Work on the jobs of a catalogue. The arguments are those of `SubmittedJobs`."""
        super().__init__(catalog, max_document_bytes, on_outcome)
        self._pausing, self._dying = threading.Event(), False
        self._leases, self._reclaimed = LeaseKeeper(catalog), 0.0
        self._ended: dict[int, float] = {}
        self._unrecorded: list[tuple[JobPlace, DocumentStatus, JobFault | None]] = []

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
        """Queue again what died with other processes since the last look, and what the catalogue forgot of this one."""
        now = time.monotonic()
        if now - self._reclaimed < RECLAIM_SECONDS:
            return
        self._reclaimed = now
        self._record_outcomes()
        mine = self._leases.worker, self._leases.held
        with self._catalog.read() as transaction:
            lost = leases.lost(transaction, *mine)
        if lost:
            with self._catalog.write() as transaction:
                again = job_table.recover(transaction, *mine)
            logger.info("%d documents are queued again: they were not finished", again)

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
        checkpoint = Checkpoint(self._catalog, (place, self._leases.worker), self._pausing)
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
        self, engine: IngestEngine, started: StartedDocument, job_id: str, checkpoint: Checkpoint
    ) -> Generator[IngestStep, None, str | None]:
        """Ingest a document as `steps` says. Returns what came of it (`DocumentOutcome`); None if it was paused."""
        place, document, fault = started
        if fault is not None:
            logger.warning("document %r of collection %r is %s", document.id, document.collection, fault.message)
            self._unrecorded.append((place, "failed", fault))
            return f"failed: {fault.code}"
        try:
            outcome = yield from checked_steps(engine, document, checkpoint)
            self._unrecorded.append((place, "unchanged" if outcome.status == "unchanged" else "completed", None))
            return outcome.status
        except (Paused, GeneratorExit) as stop:
            if not self._dying:
                self._unrecorded.append((place, "queued", None))
                with suppress(StoreFull, StoreUnavailable):  # recorded before the next document starts
                    self._record_outcomes()
            if isinstance(stop, GeneratorExit):
                raise
            return None
        except CancelledDocument:
            return "cancelled"
        except CatalogCorrupt:
            raise
        except StoreUnavailable:  # of the catalogue, for a fault of the KV store costs only time
            self._unrecorded.append((place, "queued", None))
            raise
        except ENDS:
            raise
        except BaseException as error:
            fault = fault_of(error, document.id, job_id)
            self._unrecorded.append((place, "failed", fault))
            return f"failed: {fault.code}"

    def _save_if_finished(self, engine: IngestEngine, place: JobPlace) -> None:
        """Write the index out when the document's job is finished. A fault only makes the next start slower."""
        with self._catalog.read() as transaction:
            finished = job_table.is_finished(transaction, place)
        if finished:
            self._ended.pop(place.job, None)
            try:
                engine.retriever.views.save()
            except Exception:
                logger.warning("the index was not saved", exc_info=True)

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
