"""The MCP tools by an engine in this process, as `ragkv ask` and `ragkv ingest` use it.

One thread opens the engine and works with it. It is opened while the client already lists the tools, because clients
do not wait minutes for the first response. A call waits until the engine is open.

No jobs are queued: the process ends with its client, and a job that nobody runs would wait for the next service.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar, cast

import anyio.to_thread

from ragkv.api.errors import fault_of
from ragkv.api.runtime.catalog_service import not_found
from ragkv.api.runtime.tool_backend import POLL_SECONDS, Progress, ProgressMeter, ToolRefused
from ragkv.api.schemas.common import QuestionFields
from ragkv.api.schemas.paging import read_place
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
from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.errors import InputError, NotFound, RagkvError
from ragkv.ingest.groups import ingest_all
from ragkv.ingest.job_entries import code_of
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.loader import checked
from ragkv.ingest.pipeline import remove
from ragkv.ingest.progress import Paused, Stage
from ragkv.passages import SearchResult
from ragkv.report import Answer
from ragkv.types import Document, Filter

T = TypeVar("T")


@dataclass
class _LocalIngest:
    """An ingest on its way. The engine's thread writes it, the event loop reads it."""

    documents: list[Document]
    stopped: threading.Event
    done: int = 0
    stage: str = ""
    part: float = 0.0
    unchanged: int = 0
    failures: list[FailedDocument] = field(default_factory=list)

    def run(self, engine: Engine) -> None:
        """Ingest all documents. A document that cannot be ingested fails alone. Raises Paused when it is stopped."""
        limit, good = engine.settings.max_document_bytes, list[Document]()
        for document in self.documents:
            try:
                good.append(checked(document, limit))
            except InputError as error:
                self._fail(document, error)
        for document, outcome in ingest_all(engine, good, self._progress):
            if isinstance(outcome, InputError):
                self._fail(document, outcome)
                continue
            self.unchanged += outcome.status == "unchanged"
            self.done += 1
        engine.retriever.views.save()

    def summary(self) -> IngestSummary:
        """Return what became of the documents. Raises the error of the only one."""
        total, failed = len(self.documents), len(self.failures)
        return IngestSummary(
            total=total,
            completed=total - failed - self.unchanged,
            unchanged=self.unchanged,
            failed=failed,
            cancelled=0,
            failures=self.failures,
        )

    def _fail(self, document: Document, error: InputError) -> None:
        if len(self.documents) == 1:
            raise error
        self.failures.append(FailedDocument(id=document.id, code=code_of(type(error)), message=error.public))
        self.done += 1

    def _progress(self, stage: Stage, done: int, total: int) -> None:
        if self.stopped.is_set():
            raise Paused
        self.stage, self.part = stage, done / total if total else 0.0


class LocalBackend:
    """Does the work of the tools with an engine of its own."""

    def __init__(self, settings: Settings, notify: Callable[[str], None]):
        """Begin to open the engine.

        Args:
            settings: What to open.
            notify: Receives lines that a user should see, the reason among them if the engine cannot be opened.
        """
        self._settings, self._notify = settings, notify
        self._executor = ThreadPoolExecutor(1, "engine")
        self._opening: Future[Engine] = self._executor.submit(self._open)

    def _open(self) -> Engine:
        try:
            return Engine.open(self._settings, self._notify)
        except RagkvError as error:
            self._notify(str(error))
            # The client works for who runs ragkv here, so it may know what the settings name.
            raise ToolRefused(replace(fault_of(error), detail=error.message)) from error

    def close(self, seconds: float) -> None:
        """Close the engine after the call that it works on, or leave it to the end of the process.

        Args:
            seconds: Longest wait.
        """
        closing = self._executor.submit(self._close)
        self._executor.shutdown(wait=False)
        wait([closing], seconds)

    def _close(self) -> None:
        if self._opening.exception() is None:
            self._opening.result().close()

    async def search(self, search: SearchIn) -> SearchResult:
        """Search for passages."""
        engine = await self._engine()
        top_k = search.top_k or self._settings.top_k
        return await anyio.to_thread.run_sync(
            engine.retriever.find_passages, search.query, search.scope(search.collection), top_k
        )

    async def ask(self, question: QuestionFields) -> Answer:
        """Answer a question. Decoding stops when the call is cancelled. Only the deadline of the question applies."""
        deadline, stopped = time.monotonic() + (question.deadline_s or inf), threading.Event()
        try:
            options = question.options(question.collection)
            return await self._with_engine(
                lambda engine: engine.answer(question.question, options, deadline, stopped.is_set)
            )
        except asyncio.CancelledError:
            stopped.set()
            raise

    async def ingest(self, arguments: IngestArguments, progress: Progress) -> IngestSummary:
        """Ingest documents and wait until they are in. The ingest stops when the call is cancelled."""
        documents = await anyio.to_thread.run_sync(arguments.as_documents, arguments.collection)
        running = _LocalIngest(documents, threading.Event())
        meter, total = ProgressMeter(progress), len(running.documents)
        work = asyncio.create_task(self._with_engine(running.run))
        try:
            while not work.done():
                await meter.update(running.done, total, running.stage, running.part)
                await asyncio.wait([work], timeout=POLL_SECONDS)
        except asyncio.CancelledError:
            running.stopped.set()
            work.add_done_callback(_retrieve_error)
            raise
        await work
        await meter.update(total, total)
        return running.summary()

    async def documents(self, arguments: ListArguments) -> DocumentSummaries:
        """Return a page of documents."""
        engine, order = await self._engine(), arguments.document_order
        place, conditions = read_place(arguments.after, order), cast("Filter | None", arguments.filter)
        page, limit = engine.catalog.page, arguments.limit + 1
        found = await anyio.to_thread.run_sync(page, arguments.collection, place, limit, conditions, order)
        return DocumentSummaries.of(found, arguments)

    async def collections(self) -> CollectionSummaries:
        """Return the collections that have documents."""
        return CollectionSummaries.of(await anyio.to_thread.run_sync((await self._engine()).catalog.collections))

    async def delete(self, document: DocumentName) -> None:
        """Delete a document, also one that waits for a service."""
        await self._with_engine(lambda engine: self._delete(engine, document))

    def _delete(self, engine: Engine, document: DocumentName) -> None:
        was_queued = Jobs(engine.catalog, self._settings.max_document_bytes).withdraw(document.collection, document.id)
        try:
            remove(engine, document.collection, document.id)
        except NotFound:
            if not was_queued:
                raise not_found(document.id, document.collection) from None

    async def text(self, document: DocumentName) -> str:
        """Return the text of a document. Raises NotFound."""
        original = (await self._engine()).catalog.original
        try:
            return (await anyio.to_thread.run_sync(original, document.collection, document.id)).text
        except NotFound:
            raise not_found(document.id, document.collection) from None

    async def _engine(self) -> Engine:
        return await asyncio.shield(asyncio.wrap_future(self._opening))

    async def _with_engine(self, task: Callable[[Engine], T]) -> T:
        """Call `task` in the engine's thread. A call that is cancelled before its turn is not made."""
        engine = await self._engine()
        return await asyncio.wrap_future(self._executor.submit(task, engine))


def _retrieve_error(work: asyncio.Task[None]) -> None:
    """Look at the error of an ingest that was stopped, which nobody waits for."""
    if not work.cancelled():
        work.exception()
