"""The client to await: as `Client`, method by method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import httpx2

from ragkv.client import calls
from ragkv.client.calls import Call
from ragkv.client.models import (
    AnswerMap,
    Briefs,
    Collection,
    Conversation,
    Document,
    Event,
    Job,
    Options,
    Page,
    Recalled,
)
from ragkv.report import Answer
from ragkv.types import Filter

T = TypeVar("T")


class AsyncClient:
    """Of one service, in one event loop. Every method raises Refused and Unreachable."""

    def __init__(self, url: str, key: str = "", timeout: float = calls.TIMEOUT, retries: int = calls.RETRIES):
        """url: of the service, like http://127.0.0.1:8000 · key: an API key, where it wants one · timeout: seconds for
        one answer · retries: how often a service that is busy is asked again, after as long as it says."""
        self.url, self._retries = url.rstrip("/"), retries
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=timeout)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def put(
        self,
        id: str,
        text: str,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        collection: str = "default",
    ) -> Document:
        """Have a document say this, and wait until it has been read. One that says it already costs nothing."""
        return await self._do(calls.put(id, text, title, metadata, collection))

    async def send(self, documents: Sequence[Mapping[str, Any]], collection: str = "default") -> str:
        """Queue documents {"id", "text", "title"?, "metadata"?}, at most 1000, as a job; returns its id."""
        return await self._do(calls.send(documents, collection))

    async def upload(
        self,
        paths: Sequence[Path],
        names: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        collection: str = "default",
    ) -> str:
        """Queue files as a job; returns its id. names: what they are called there, their ids; default: their names.

        Raises OSError for a file that cannot be read.
        """
        return await self._do(calls.upload(paths, names or [path.name for path in paths], metadata, collection))

    async def documents(self, collection: str = "default", filter: Filter | None = None) -> AsyncIterator[Document]:
        """All documents of a collection, by id; pages are fetched on the way."""
        after: str | None = ""
        while after is not None:
            found = await self.page(collection, 100, after, filter)
            for document in found.documents:
                yield document
            after = found.after

    async def page(
        self, collection: str = "default", limit: int = 20, after: str = "", filter: Filter | None = None
    ) -> Page:
        """Documents of a collection, by id, those behind `after`."""
        return await self._do(calls.page(collection, limit, after, filter))

    async def document(self, id: str, collection: str = "default", text: bool = False) -> Document:
        """One document; with its text where that is wanted."""
        return await self._do(calls.document(id, collection, text))

    async def remove(self, id: str, collection: str = "default") -> None:
        """Forget a document, at any time."""
        await self._do(calls.remove(id, collection))

    async def job(self, id: str, all: bool = False) -> Job:
        """How far a job is. all: with all of its documents, not only the first 20 that failed."""
        return await self._do(calls.job(id, all))

    async def jobs(self, limit: int = 20) -> tuple[Job, ...]:
        """The latest jobs, newest first."""
        return await self._do(calls.jobs(limit))

    async def cancel(self, id: str) -> Job:
        """Stop a job; documents that are in stay in."""
        return await self._do(calls.cancel(id))

    async def follow(self, id: str) -> AsyncIterator[Job]:
        """The job whenever it has changed, until it is done; a stream that breaks off is taken up again."""
        while True:
            async with self._events(calls.follow(id)) as events:
                async for event in events:
                    found = calls.job_of(event)
                    if found is not None:
                        yield found
                    if found is not None and found.finished is not None:
                        return

    async def wait(self, id: str) -> Job:
        """The job, once it is done."""
        last: Job | None = None
        async for found in self.follow(id):
            last = found
        if last is None:
            raise calls.unreachable(self.url, EOFError("its events ended"))
        return last

    async def collections(self) -> tuple[Collection, ...]:
        """The collections that have documents."""
        return await self._do(calls.collections())

    async def remove_collection(self, name: str) -> None:
        """Forget a collection: documents, what waits for it, conversations."""
        await self._do(calls.remove_collection(name))

    async def ask(self, question: str, **options: Unpack[Options]) -> Answer:
        """Answer a question."""
        return await self._do(calls.ask(question, False, options))

    async def stream(self, question: str, **options: Unpack[Options]) -> AsyncIterator[Event]:
        """As `ask`, in pieces, while it is decoded. Whoever stops reading should close the iterator: the service then
        stops, too."""
        async with self._events(calls.ask(question, True, options)) as events:
            async for event in events:
                found = calls.event_of(event)
                if found is not None:
                    yield found

    async def answers(self, limit: int = 20, before: float | None = None) -> Briefs:
        """The latest answers that the service remembers, newest first, those before that moment."""
        return await self._do(calls.answers(limit, before))

    async def recall(self, id: str) -> Recalled:
        """A remembered answer, by the id of its request."""
        return await self._do(calls.recall(id))

    async def map(self, id: str) -> AnswerMap:
        """What a remembered answer was read from."""
        return await self._do(calls.answer_map(id))

    async def conversation(self, id: str, collection: str = "default") -> Conversation:
        """What was said in a conversation."""
        return await self._do(calls.conversation(id, collection))

    async def forget(self, id: str, collection: str = "default") -> None:
        """Forget a conversation."""
        await self._do(calls.forget(id, collection))

    async def metrics(self) -> str:
        """What it counts, of all who ask, as Prometheus text."""
        return await self._do(calls.metrics())

    async def ready(self) -> bool:
        """Whether questions are answered now."""
        try:
            return (await self._http.get("/readyz")).status_code == 200
        except httpx2.TransportError:
            return False

    async def _do(self, call: Call[T]) -> T:
        tries = self._retries
        while True:
            try:
                response = await self._http.request(call.method, call.path, **call.given)
            except httpx2.TransportError as error:
                raise calls.unreachable(self.url, error) from None
            fault = calls.refused(response)
            if fault is None:
                return call.read(response)
            wait = calls.again(fault, tries)
            if wait is None:
                raise fault
            tries -= 1
            await asyncio.sleep(wait)

    @asynccontextmanager
    async def _events(self, call: Call[Any]) -> AsyncIterator[AsyncIterator[httpx2.ServerSentEvent]]:
        tries = self._retries
        try:
            while True:
                async with self._http.stream(call.method, call.path, **call.given) as response:
                    if response.is_success:
                        yield aiter(httpx2.EventSource(response))
                        return
                    await response.aread()
                    fault = calls.refused(response)
                wait = calls.again(fault, tries) if fault else None
                if fault is not None and wait is None:
                    raise fault
                tries -= 1
                await asyncio.sleep(wait or 0.0)
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from None
