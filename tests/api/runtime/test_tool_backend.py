"""The progress of an ingest as the protocol wants it, and the outcome of a job."""

from __future__ import annotations

import asyncio

import pytest

from ragkv.api.runtime.tool_backend import ProgressMeter, ToolRefused, summarize_job
from ragkv.ingest.jobs import Counts, IngestJob, JobEntry, JobFault


def test_progress_counts_documents_and_what_is_encoded_of_one_and_only_grows() -> None:
    sent: list[tuple[float, float | None, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        sent.append((progress, total, message))

    async def ingest() -> None:
        meter = ProgressMeter(note)
        for done, stage, part in (
            *((0, "", 0.0), (0, "split", 0.9), (0, "encode", 0.5), (0, "encode", 0.25), (0, "encode", 1.5)),
            *((1, "embed", 0.5), (1, "encode", 0.5), (2, "index", 1.0), (2, "", 0.0)),
        ):
            await meter.update(done, 2, stage, part)

    asyncio.run(ingest())
    assert sent == [
        (0.0, 2, "0 of 2 documents"),
        (0.5, 2, "0 of 2 documents, encode"),
        (1.0, 2, "0 of 2 documents, encode"),
        (1.5, 2, "1 of 2 documents, encode"),
        (2.0, 2, "2 of 2 documents"),
    ]


def job(counts: Counts, *documents: JobEntry, error: JobFault | None = None) -> IngestJob:
    return IngestJob(
        *("id", "default", "failed", "", 0, 0, counts, None, error, error, documents), *(0.0, 0.0, 0.0, 0.0)
    )


def test_the_only_document_of_a_job_fails_the_call_and_one_of_several_is_listed() -> None:
    empty = JobFault("invalid_document", "document 'a' is empty")
    failed = JobEntry("a", "failed", empty)
    with pytest.raises(ToolRefused) as refused:
        summarize_job(job(Counts(1, 1, 0, 0, 1, 0), failed, error=empty))
    assert (refused.value.fault.detail, refused.value.fault.code) == (empty.message, "invalid_document")
    with pytest.raises(ToolRefused, match="the document was deleted"):
        summarize_job(job(Counts(1, 1, 0, 0, 0, 1)))
    some = summarize_job(job(Counts(3, 3, 1, 1, 1, 0), failed))
    assert (some.total, some.completed, some.unchanged, some.failed) == (3, 1, 1, 1)
    assert [(each.id, each.code, each.message) for each in some.failures] == [("a", "invalid_document", empty.message)]
