"""The MCP tools by a service at an address. Its answers and its errors are passed on as they are."""

from __future__ import annotations

from typing import cast

from ragkv.api.runtime.tool_backend import Progress, ProgressMeter, summarize_job
from ragkv.api.schemas.common import QuestionFields
from ragkv.api.schemas.search import SearchIn
from ragkv.api.schemas.tools import (
    CollectionSummaries,
    DocumentName,
    DocumentSummaries,
    DocumentSummary,
    IngestArguments,
    IngestSummary,
    ListArguments,
)
from ragkv.client import AsyncClient
from ragkv.client.models import Options
from ragkv.passages import SearchResult
from ragkv.report import Answer
from ragkv.types import Filter


class ClientBackend:
    """Does the work of the tools through the client of the HTTP API."""

    def __init__(self, client: AsyncClient):
        self._client = client

    async def search(self, search: SearchIn) -> SearchResult:
        """Search for passages."""
        return await self._client.search(**search.model_dump())

    async def ask(self, question: QuestionFields) -> Answer:
        """Answer a question. The service drops it when the call is cancelled."""
        options = cast("Options", question.model_dump(exclude={"question"}))
        return await self._client.ask(question.question, **options)

    async def ingest(self, arguments: IngestArguments, progress: Progress) -> IngestSummary:
        """Ingest documents as a job and follow it. The job goes on when the call is cancelled."""
        meter = ProgressMeter(progress)
        job_id = await self._client.send([each.model_dump() for each in arguments.documents], arguments.collection)
        async for job in self._client.follow(job_id):
            part = job.done / job.total if job.total else 0.0
            await meter.update(job.counts.done, job.counts.total, job.stage, part)
        return summarize_job(await self._client.job(job_id))

    async def documents(self, arguments: ListArguments) -> DocumentSummaries:
        """Return a page of documents."""
        conditions = cast("Filter | None", arguments.filter)
        page = await self._client.page(
            *(arguments.collection, arguments.limit, arguments.after, conditions),
            sort=arguments.sort,
            order=arguments.order,
            q=arguments.q,
        )
        return DocumentSummaries(documents=[DocumentSummary.of(each) for each in page.documents], after=page.after)

    async def collections(self) -> CollectionSummaries:
        """Return the collections that have documents."""
        return CollectionSummaries.of(await self._client.collections())

    async def delete(self, document: DocumentName) -> None:
        """Delete a document."""
        await self._client.remove(document.id, document.collection)

    async def text(self, document: DocumentName) -> str:
        """Return the text of a document."""
        return (await self._client.text(document.id, document.collection)).text
