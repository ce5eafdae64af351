"""Ingest jobs: a table in the catalogue is the truth, one worker takes documents from it, a crash loses nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from ingest import job_table, job_view
from ingest.job_table import JobPlace
from ingest.job_view import Backlog, Counts, DocumentStatus, IngestJob, JobEntry, JobFault, Listed, Status
from ingest.loader import MAX_NAME, Rejected, checked
from ingest.pipeline import IngestEngine, Paused, Stage, ingest
from ragkv.catalog import Catalog
from ragkv.errors import CatalogCorrupt, InputError, RagkvError
from ragkv.types import Document

__all__ = ["Backlog", "Counts", "IngestJob", "JobEntry", "JobFault", "Jobs", "Listed", "Status", "code_of"]

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.25
"""Least time between two writes of a job's progress."""


class Jobs:
    """The jobs of a catalogue. Thread-safe, but run_next belongs to the one thread that owns the engine."""

    def __init__(self, catalog: Catalog, max_document_bytes: int):
        self._catalog = catalog
        self._limit = max_document_bytes
        self._pausing = threading.Event()
        self._owed: list[tuple[JobPlace, DocumentStatus, JobFault | None]] = []

    def submit(self, items: Sequence[Document | Rejected], collection: str | None = None) -> str:
        """Queue documents of one collection; returns the job's id. Raises InputError when there are none.

        A document that cannot be ingested fails in the job, the others go on. Sending what is already waiting, with
        nothing newer behind it, returns the job that has it. collection: theirs; where none is given, the documents'
        own, or `default` when all were rejected.
        """
        collections = {item.collection for item in items if isinstance(item, Document)}
        collections |= {collection} if collection is not None else set()
        if not items or len(collections) > 1:
            raise InputError("a job needs documents, all of one collection")
        collection = _storable(collections.pop() if collections else "default")
        entries = [_entry(item, self._limit) for item in items]
        digest = hashlib.sha256(json.dumps([collection, entries], sort_keys=True).encode()).hexdigest()
        with self._catalog.write() as connection:
            return job_table.insert(connection, uuid.uuid4().hex, collection, digest, entries)

    def get(self, job_id: str, listed: Listed = "all") -> IngestJob:
        """listed: which of its documents come with it. Raises NotFound."""
        with self._catalog.read() as connection:
            return job_view.get(connection, job_id, listed)

    def recent(
        self, limit: int = 50, prefix: str = "", status: Status | None = None, listed: Listed = "failed"
    ) -> list[IngestJob]:
        """The latest jobs, newest first. prefix: of their collections' names · status: only those of it."""
        with self._catalog.read() as connection:
            return job_view.recent(connection, limit, prefix, status, listed)

    def backlog(self) -> Backlog:
        """What waits, of all collections."""
        with self._catalog.read() as connection:
            return job_view.backlog(connection)

    def cancel(self, job_id: str, listed: Listed = "all") -> IngestJob:
        """Stop a job: what waits is dropped, what is being read stops at its next chunk. Raises NotFound.

        Documents already in the catalogue stay there; so does one that is being written to it at this moment.
        """
        with self._catalog.write() as connection:
            job_table.cancel(connection, job_id)
        return self.get(job_id, listed)

    def withdraw(self, collection: str, document_id: str) -> bool:
        """A document was deleted: no job brings it back. True when one would have, or had failed to."""
        with self._catalog.write() as connection:
            return job_table.withdraw(connection, collection, document_id)

    def abandon(self, collection: str) -> bool:
        """A collection was deleted: no job that waits now brings any of it back. True when one would have."""
        with self._catalog.write() as connection:
            return job_table.abandon(connection, collection)

    def waits(self, collection: str, document_id: str) -> bool:
        """Whether a version of the document is still to be read."""
        with self._catalog.read() as connection:
            return job_table.waits(connection, collection, document_id)

    def recover(self) -> int:
        """Queue again what a process was reading when it died. Call once, before any run_next. Returns how many."""
        with self._catalog.write() as connection:
            return job_table.recover(connection)

    def pause(self) -> None:
        """Stop at the next chunk and queue that document again; run_next then does nothing more. For shutdown."""
        self._pausing.set()

    def run_next(self, engine: IngestEngine, between: Callable[[], None] | None = None) -> str | None:
        """Ingest the next waiting document; returns its job's id, None when nothing waits.

        between: called between chunks, where the engine is free to answer questions. Faults of the document go into
        the job. Raises StoreFull, StoreUnavailable when not even that can be written: call again later; CatalogCorrupt.
        """
        self._record()
        taken = self._take()
        if taken is None:
            return None
        place, document = taken
        with self._catalog.read() as connection:
            job_id = job_table.name(connection, place)
        watch = _Watch(self._catalog, place, self._pausing, between)
        try:
            outcome = ingest(engine, document, watch, watch.check)
            self._owed.append((place, "unchanged" if outcome.status == "unchanged" else "completed", None))
        except Paused:
            with self._catalog.write() as connection:
                job_table.put_back(connection, place)
        except _Cancelled:
            pass
        except CatalogCorrupt:
            raise
        except RagkvError as fault:
            self._owed.append((place, "failed", JobFault(code_of(type(fault)), str(fault))))
        except Exception as fault:
            logger.exception("document %r of job %s", document.id, job_id)
            message = f"{type(fault).__name__} while reading the document; see the log"
            self._owed.append((place, "failed", JobFault("internal_error", message)))
        self._record(watch.seconds)
        with self._catalog.read() as connection:
            finished = job_table.finished(connection, place)
        if finished:
            engine.retriever.save()
        return job_id

    def _take(self) -> tuple[JobPlace, Document] | None:
        if self._pausing.is_set():
            return None
        with self._catalog.write() as connection:
            return job_table.take(connection)

    def _record(self, seconds: float | None = None) -> None:
        """Write down what became of documents; what a full disk kept from being written is tried again here.

        seconds: that the last of them took.
        """
        while self._owed:
            with self._catalog.write() as connection:
                job_table.finish(connection, *self._owed[0])
                if seconds is not None and len(self._owed) == 1:
                    job_table.pace(connection, self._owed[0][0], seconds)
            self._owed.pop(0)


class _Cancelled(Exception):
    """The document being read is no longer wanted."""


class _Watch:
    """The Progress of a document in a job: writes it down, and stops the work when it is to stop."""

    def __init__(self, catalog: Catalog, place: JobPlace, pausing: threading.Event, between: Callable[[], None] | None):
        self._catalog, self._place, self._pausing, self._between = catalog, place, pausing, between
        self._stage, self._written = "", 0.0
        self._began = self._entered = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the document was taken up."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Raises _Cancelled when the document is no longer wanted."""
        with self._catalog.read() as connection:
            wanted = job_table.running(connection, self._place)
        if not wanted:
            raise _Cancelled

    def __call__(self, stage: Stage, done: int, total: int) -> None:
        if self._between and stage != "index":
            self._between()
        if stage == "index":
            return  # committed: too late to stop
        self.check()
        if self._pausing.is_set():
            raise Paused
        now = time.monotonic()
        if stage != self._stage:
            self._entered = now
        if stage != self._stage or now - self._written >= REPORT_SECONDS:
            self._stage, self._written = stage, now
            with self._catalog.write() as connection:
                job_table.report(connection, self._place, stage, done, total, self._rest(done, total))

    def _rest(self, done: int, total: int) -> float | None:
        """Seconds until the document is read, which is nearly all encoding; None where that has not gone far enough."""
        if self._stage != "encode" or not done:
            return None
        return (total - done) * (time.monotonic() - self._entered) / done


def _entry(item: Document | Rejected, limit: int) -> dict[str, str | None]:
    """The row of a document that is sent."""
    row: dict[str, str | None] = {"status": "queued", "code": None, "message": None, "payload": None}
    try:
        if isinstance(item, Rejected):
            raise item.error
        checked(item, limit)
    except InputError as error:
        name = item.source if isinstance(item, Rejected) else item.id
        return {
            **row,
            "id": _storable(name),
            "status": "failed",
            "code": code_of(type(error)),
            "message": _storable(str(error)),
        }
    return {**row, "id": item.id, "payload": json.dumps([item.title, item.text, dict(item.metadata)])}


def code_of(kind: type[Exception]) -> str:
    """What a kind of fault is called in a JobError."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _storable(name: str) -> str:
    """A label for what could not be ingested, its name included."""
    return name.encode(errors="backslashreplace").decode()[: 4 * MAX_NAME]
