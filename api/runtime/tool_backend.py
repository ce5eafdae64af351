"""What the MCP tools ask for, whoever does it.

ServiceBackend   the service itself, for the tenant of a request to /mcp
ClientBackend    a service at an address, for `ragkv mcp --url`
LocalBackend     an engine in this process, for `ragkv mcp`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from ragkv.api.errors import Fault, fault_of_job
from ragkv.api.schemas.common import QuestionFields
from ragkv.api.schemas.search import SearchIn
from ragkv.api.schemas.tools import (
    CollectionSummaries,
    DocumentName,
    DocumentSummaries,
    FailedDocument,
    IngestArguments,
    IngestSummary,
    ListArguments,
)
from ragkv.client import Job
from ragkv.ingest.jobs import IngestJob, JobFault
from ragkv.passages import SearchResult
from ragkv.report import Answer

POLL_SECONDS = 0.1
"""Time between two looks at an ingest."""

Progress = Callable[[float, float | None, str | None], Awaitable[None]]
"""Receives (done, total, message)."""


class ToolBackend(Protocol):
    """Does the work of the tools. Each method raises RagkvError or ToolRefused."""

    async def search(self, search: SearchIn) -> SearchResult:
        """Search for passages."""

    async def ask(self, question: QuestionFields) -> Answer:
        """Answer a question."""

    async def ingest(self, arguments: IngestArguments, progress: Progress) -> IngestSummary:
        """Ingest documents and wait until they are in."""

    async def documents(self, arguments: ListArguments) -> DocumentSummaries:
        """Return a page of documents."""

    async def collections(self) -> CollectionSummaries:
        """Return the collections that have documents."""

    async def delete(self, document: DocumentName) -> None:
        """Delete a document."""

    async def text(self, document: DocumentName) -> str:
        """Return the text of a document."""


class ToolRefused(Exception):
    """A tool could not do what it was asked for.

    Attributes:
        fault: What the client is told.
    """

    def __init__(self, fault: Fault):
        super().__init__(fault.detail)
        self.fault = fault


class ProgressMeter:
    """Reports the progress of an ingest in documents. A document that is being encoded counts in part.

    The protocol wants every report to be larger than the one before, so others are not sent.
    """

    def __init__(self, report: Progress):
        self._report, self._sent = report, -1.0

    async def update(self, done: int, total: int, stage: str = "", part: float = 0.0) -> None:
        """Report how far the ingest is.

        Args:
            done: Documents that no longer wait.
            total: All documents.
            stage: Stage of the document that is being ingested; "" if none is.
            part: Share of that stage that is done.
        """
        stage = stage if done < total else ""
        now = done + (min(part, 1.0) if stage == "encode" else 0.0)
        if now > self._sent:
            self._sent = now
            await self._report(now, total, f"{done} of {total} documents" + (f", {stage}" if stage else ""))


def summarize_job(job: IngestJob | Job) -> IngestSummary:
    """Return what became of the documents of a finished job.

    Raises:
        ToolRefused: It had one document, and that is not in.
    """
    counts = job.counts
    if counts.total == 1 and not (counts.completed or counts.unchanged):
        raise ToolRefused(fault_of_job(None if job.error is None else JobFault(job.error.code, job.error.message)))
    failures = [
        FailedDocument(id=each.id, code=each.error.code, message=each.error.message)
        for each in job.documents
        if each.error is not None
    ]
    return IngestSummary(
        total=counts.total,
        completed=counts.completed,
        unchanged=counts.unchanged,
        failed=counts.failed,
        cancelled=counts.cancelled,
        failures=failures,
    )
