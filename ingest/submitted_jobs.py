"""What anybody may do with ingest jobs: submit documents, look at jobs, and stop them. `jobs` works on them."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Sequence

from ragkv.catalog import Catalog
from ragkv.catalog.database import again_with_room
from ragkv.errors import InputError
from ragkv.ingest import job_table, job_view
from ragkv.ingest.document_ids import Rejected
from ragkv.ingest.job_entries import entry_of, storable
from ragkv.ingest.job_view import Backlog, DocumentOutcome, IngestJob, Listed, SetAside, Status, ignore_outcome
from ragkv.types import Document

logger = logging.getLogger(__name__)


class SubmittedJobs:
    """The jobs of a catalogue. Thread-safe.

    Attributes:
        submitted: Counts the jobs that were submitted.
    """

    def __init__(
        self, catalog: Catalog, max_document_bytes: int, on_outcome: Callable[[DocumentOutcome], None] = ignore_outcome
    ):
        """Look at the jobs of a catalogue.

        Args:
            catalog: The catalogue.
            max_document_bytes: Longest document.
            on_outcome: Is called with what came of each document.
        """
        self._catalog, self._limit, self._on_outcome = catalog, max_document_bytes, on_outcome
        self.submitted = 0

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
        collection = storable(collections.pop() if collections else "default")
        entries = [entry_of(item, self._limit) for item in items]
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

    def set_aside(self) -> list[SetAside]:
        """Return the documents that were set aside, the earliest first."""
        with self._catalog.read() as transaction:
            return job_view.set_aside(transaction)

    def forget_set_aside(self) -> int:
        """Remove the documents that were set aside. Returns how many there were."""
        with self._catalog.write() as transaction:
            return job_table.forget_set_aside(transaction)

    def _tell(self, outcome: DocumentOutcome) -> None:
        """Tell what came of a document. A fault of who is told is none of the document."""
        try:
            self._on_outcome(outcome)
        except Exception:
            logger.exception("the outcome of document %r was not told", outcome.document_id)
