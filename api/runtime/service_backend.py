"""The MCP tools inside the service: they call what the routes call, for the tenant of the request."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import State
from starlette.types import Message

from ragkv.api.middleware.rate_limit import quota_fault
from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.catalog_service import not_found
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.ingest_queue import enqueue
from ragkv.api.runtime.rate_limits import RateLimiter, Resource
from ragkv.api.runtime.removal import remove_document_of
from ragkv.api.runtime.tool_backend import POLL_SECONDS, Progress, ProgressMeter, ToolRefused, summarize_job
from ragkv.api.schemas.common import QuestionFields
from ragkv.api.schemas.paging import read_place
from ragkv.api.schemas.search import SearchIn
from ragkv.api.schemas.tools import (
    CollectionSummaries,
    DocumentName,
    DocumentSummaries,
    IngestArguments,
    IngestSummary,
    ListArguments,
)
from ragkv.config import Settings
from ragkv.errors import NotFound
from ragkv.passages import SearchResult
from ragkv.report import Answer
from ragkv.types import Filter


class ServiceBackend:
    """Does the work of the tools for one request."""

    def __init__(self, state: State, caller: Caller):
        """Take what the work needs from the state of the application."""
        self._engine_thread: EngineThread = state.engine_thread
        self._settings: Settings = state.settings
        self._limiter: RateLimiter = state.limiter
        self._caller, self._tenant = caller, caller.tenant

    async def search(self, search: SearchIn) -> SearchResult:
        """Search for passages."""
        scope = search.scope(self._tenant.inside(search.collection))
        found = self._engine_thread.passage_search.find(search.query, scope, search.top_k or self._settings.top_k)
        return await found

    async def ask(self, question: QuestionFields) -> Answer:
        """Answer a question. The engine drops it when the call is cancelled."""
        self._require("tokens")
        options = question.options(self._tenant.inside(question.collection))
        seconds = min(self._settings.deadline, question.deadline_s or self._settings.deadline)
        # The server of the protocol watches the connection and cancels the call, so the stream need not.
        stream = AnswerStream(
            *(self._engine_thread, _nothing_comes, question.question, options, self._tenant.name, seconds), False
        )
        return await stream.whole()

    async def ingest(self, arguments: IngestArguments, progress: Progress) -> IngestSummary:
        """Ingest documents as a job and wait for it. The job goes on when the call is cancelled."""
        thread, inside = self._engine_thread, self._tenant.inside(arguments.collection)
        self._require("bytes")
        stored = self._limiter.limits(self._tenant.name).stored
        await run_in_threadpool(thread.catalog_service.check_room, self._tenant, stored)
        documents = await run_in_threadpool(arguments.as_documents, inside)
        job_id, meter = await enqueue(documents, inside, thread, self._caller), ProgressMeter(progress)
        self._limiter.charge(self._tenant.name, "bytes", sum(len(each.text.encode()) for each in documents))
        while True:
            found = await run_in_threadpool(thread.jobs.get, job_id, "failed")
            part = found.done / found.total if found.total else 0.0
            await meter.update(found.counts.done, found.counts.total, found.stage, part)
            if found.finished is not None:
                return self._told(summarize_job(found))
            thread.check_ingest(job_id)
            await asyncio.sleep(POLL_SECONDS)

    async def documents(self, arguments: ListArguments) -> DocumentSummaries:
        """Return a page of documents."""
        service, order = self._engine_thread.catalog_service, arguments.document_order
        place, conditions = read_place(arguments.after, order), cast("Filter | None", arguments.filter)
        inside = self._tenant.inside(arguments.collection)
        found = await run_in_threadpool(service.page, inside, place, arguments.limit + 1, conditions, order)
        return DocumentSummaries.of(found, arguments, self._tenant)

    async def collections(self) -> CollectionSummaries:
        """Return the collections that have documents."""
        found = await run_in_threadpool(self._engine_thread.catalog_service.collections, self._tenant.inside(""))
        return CollectionSummaries.of(found, self._tenant)

    async def delete(self, document: DocumentName) -> None:
        """Delete a document, also one that is queued or being ingested."""
        await run_in_threadpool(remove_document_of, self._caller, document.collection, document.id, self._engine_thread)

    async def text(self, document: DocumentName) -> str:
        """Return the text of a document. Raises NotFound."""
        whole, inside = self._engine_thread.catalog_service.whole, self._tenant.inside(document.collection)
        try:
            _, text = await run_in_threadpool(whole, inside, document.id)
        except NotFound:
            raise not_found(document.id, document.collection) from None
        return text

    def _require(self, resource: Resource) -> None:
        """Raise ToolRefused if the tenant has used up a quota of this minute."""
        exhausted = self._limiter.check(self._tenant.name, resource)
        if exhausted is not None:
            raise ToolRefused(quota_fault(exhausted))

    def _told(self, summary: IngestSummary) -> IngestSummary:
        """Name collections in the reasons as the tenant knows them."""
        told = [each.model_copy(update={"message": self._tenant.told(each.message)}) for each in summary.failures]
        return summary.model_copy(update={"failures": told})


async def _nothing_comes() -> Message:
    forever: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    message: Message = await forever
    return message
