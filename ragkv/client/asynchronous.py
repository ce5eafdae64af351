"""The asynchronous client: the same methods as `Client`, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import httpx2

from ragkv.client import calls, responses
from ragkv.client.calls import Call
from ragkv.client.chat import ChatAnswer, ChatMessage, ChatOptions, ChatParser
from ragkv.client.document_models import (
    Collection,
    Listing,
    Page,
    RemoteChunk,
    RemoteDocument,
    RemotePicture,
    RemoteText,
)
from ragkv.client.job_models import Job
from ragkv.client.models import AnswerMap, Briefs, Conversation, Event, Options, Recalled, Said
from ragkv.client.text_models import Embeddings, HandedQuestion, RankedTexts
from ragkv.passages import SearchResult
from ragkv.report import Answer
from ragkv.types import Filter

T = TypeVar("T")


class AsyncClient:
    """An asynchronous client of one service, for one event loop.

    Every method raises Refused if the service refuses the request, and Unreachable if there is no connection.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        timeout: float = calls.TIMEOUT,
        retries: int = calls.RETRIES,
        transport: httpx2.AsyncBaseTransport | None = None,
    ):
        """Create a client.

        Args:
            url: Address of the service, such as http://127.0.0.1:8000.
            key: API key, if the service requires one.
            timeout: Seconds to wait for an answer, or for the next event of a stream.
            retries: How often a request to a busy service is retried, after the delay that the service asks for.
            transport: Carries the requests; None for HTTP.
        """
        self.url, self._key, self._retries = url.rstrip("/"), key, retries
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A question holds a connection until its answer ends, and the service limits how many it answers.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            limits=limits,
            verify=calls.tls_context(),
            transport=transport,
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # Documents

    async def put(
        self,
        id: str,
        text: str,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        collection: str = "default",
    ) -> RemoteDocument:
        """Add or replace a document, and wait until it is ingested. Unchanged content is not ingested again.

        Args:
            id: Id of the document, unique inside its collection.
            text: Text of the document.
            title: Title of the document.
            metadata: Metadata that filters can select.
            collection: Collection of the document.
        """
        return await self._request(calls.put(id, text, title, metadata, collection))

    async def send(self, documents: Sequence[Mapping[str, Any]], collection: str = "default") -> str:
        """Queue documents as a job.

        Args:
            documents: At most 1000 objects {"id", "text", "title"?, "metadata"?}.
            collection: Collection of the documents.

        Returns:
            The id of the job.
        """
        return await self._request(calls.send(documents, collection))

    async def upload(
        self,
        paths: Sequence[Path],
        names: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        collection: str = "default",
        sources: Sequence[str] | None = None,
    ) -> str:
        """Queue files as a job.

        Args:
            paths: Files to upload.
            names: Names of the files in the service, which become the document ids; by default the file names.
            metadata: Metadata of all documents.
            collection: Collection of the documents.
            sources: What tells each file from all others, such as its whole path; "" for none. A file whose name is
                the id of a document from another source then gets a longer id, made of its source.

        Returns:
            The id of the job.

        Raises:
            OSError: A file cannot be read.
        """
        given = names or [path.name for path in paths]
        return await self._request(calls.upload(paths, given, metadata, collection, sources))

    async def documents(
        self, collection: str = "default", filter: Filter | None = None, **listing: Unpack[Listing]
    ) -> AsyncIterator[RemoteDocument]:
        """Iterate over the documents of a collection, by default ordered by id. Pages are fetched as needed.

        Args:
            collection: Collection to list.
            filter: Only documents whose metadata matches.
            **listing: See `ragkv.client.document_models.Listing`.
        """
        after: str | None = ""
        while after is not None:
            page = await self.page(collection, 100, after, filter, **listing)
            for document in page.documents:
                yield document
            after = page.after

    async def page(
        self,
        collection: str = "default",
        limit: int = 20,
        after: str = "",
        filter: Filter | None = None,
        **listing: Unpack[Listing],
    ) -> Page:
        """Return one page of the documents of a collection, by default ordered by id.

        Args:
            collection: Collection to list.
            limit: Largest number of documents.
            after: The `after` of the previous page; "" for the first.
            filter: Only documents whose metadata matches.
            **listing: See `ragkv.client.document_models.Listing`. It is the same for all pages.
        """
        return await self._request(calls.page(collection, limit, after, filter, listing))

    async def document(self, id: str, collection: str = "default", text: bool = False) -> RemoteDocument:
        """Return a document, with its text if `text` is set."""
        return await self._request(calls.document(id, collection, text))

    async def text(self, id: str, collection: str = "default", start: int = 0, end: int | None = None) -> RemoteText:
        """Return the text of a document.

        Args:
            id: Id of the document.
            collection: Collection of the document.
            start: Offset of the first character.
            end: Offset after the last one; None returns the rest of the text.
        """
        return await self._request(calls.document_text(id, collection, start, end))

    async def picture(
        self, id: str, number: int, collection: str = "default", *, start: int = 0, end: int | None = None
    ) -> RemotePicture:
        """Return a page of a PDF as a picture, with a passage marked.

        Args:
            id: Id of the document.
            number: Number of the page, from 1.
            collection: Collection of the document.
            start: Offset of the passage's first character in the document's text.
            end: Offset after its last one; None marks nothing.

        Raises:
            Refused: There is no such page, or the service keeps no file of the document.
        """
        return await self._request(calls.picture(id, number, collection, start, end))

    async def chunks(self, id: str, collection: str = "default") -> AsyncIterator[RemoteChunk]:
        """Iterate over the chunks of a document, in order. Pages are fetched as needed."""
        after: int | None = -1
        while after is not None:
            page = await self._request(calls.chunks(id, collection, 100, after))
            for chunk in page.chunks:
                yield chunk
            after = page.after

    async def remove(self, id: str, collection: str = "default") -> None:
        """Delete a document."""
        await self._request(calls.remove(id, collection))

    async def collections(self) -> tuple[Collection, ...]:
        """Return the collections that have documents."""
        return await self._request(calls.collections())

    async def remove_collection(self, name: str) -> None:
        """Delete a collection: its documents, its queued documents and its conversations."""
        await self._request(calls.remove_collection(name))

    # Jobs

    async def job(self, id: str, all: bool = False) -> Job:
        """Return the state of a job.

        Args:
            id: Id of the job.
            all: Include all documents, not only the first 20 failed ones.
        """
        return await self._request(calls.job(id, all))

    async def jobs(self, limit: int = 20) -> tuple[Job, ...]:
        """Return the latest jobs, newest first."""
        return await self._request(calls.jobs(limit))

    async def cancel(self, id: str) -> Job:
        """Cancel a job. Documents that are already ingested stay."""
        return await self._request(calls.cancel(id))

    async def follow(self, id: str) -> AsyncIterator[Job]:
        """Yield a job whenever it changes, until it ends. An interrupted stream is resumed."""
        while True:
            async with self._stream(calls.follow(id)) as events:
                async for event in events:
                    job = responses.parse_job_event(event)
                    if job is not None:
                        yield job
                    if job is not None and job.finished is not None:
                        return

    async def wait(self, id: str) -> Job:
        """Wait until a job ends, and return it."""
        last: Job | None = None
        async for job in self.follow(id):
            last = job
        if last is None:
            raise responses.unreachable(self.url, EOFError("its events ended"))
        return last

    # Questions

    async def ask(self, question: str, **options: Unpack[Options]) -> Answer:
        """Answer a question.

        Args:
            question: Text of the question.
            **options: See `ragkv.client.models.Options`.
        """
        return await self._request(calls.ask(question, False, options))

    async def stream(self, question: str, **options: Unpack[Options]) -> AsyncIterator[Event]:
        """Answer a question and yield events while it is decoded.

        Close the iterator to cancel the answer; the service then stops decoding.

        Args:
            question: Text of the question.
            **options: See `ragkv.client.models.Options`.
        """
        async with self._stream(calls.ask(question, True, options)) as events:
            async for data in events:
                event = responses.parse_event(data)
                if event is not None:
                    yield event

    async def models(self) -> tuple[str, ...]:
        """Return the valid values of `model` in a chat: the loaded model, and NAME:METHOD for each method."""
        return await self._request(calls.models())

    async def chat(self, model: str, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> ChatAnswer:
        """Answer the last message of a chat, as OpenAI's API does, from the documents of a collection.

        Args:
            model: One of `models`.
            messages: Messages of the chat; the last one is the question.
            **options: See `ragkv.client.chat.ChatOptions`.
        """
        return await self._request(calls.chat(model, messages, False, options))

    async def stream_chat(
        self, model: str, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[Said | ChatAnswer]:
        """Answer the last message of a chat; yield the pieces of the answer, and then the whole of it.

        Close the iterator to cancel the answer; the service then stops decoding.

        Args:
            model: One of `models`.
            messages: Messages of the chat; the last one is the question.
            **options: See `ragkv.client.chat.ChatOptions`.
        """
        parser = ChatParser()
        async with self._stream(calls.chat(model, messages, True, options)) as events:
            async for data in events:
                event = parser.parse(data)
                if event is not None:
                    yield event

    async def search(
        self,
        query: str,
        collection: str = "default",
        top_k: int | None = None,
        filter: Filter | None = None,
        documents: Sequence[str] | None = None,
    ) -> SearchResult:
        """Search for passages. Nothing is generated.

        Args:
            query: Words, or a question.
            collection: Collection to search.
            top_k: Number of passages; None uses the setting of the service.
            filter: Only documents whose metadata matches.
            documents: Only the documents with these ids.
        """
        return await self._request(calls.search(query, collection, top_k, filter, documents))

    async def embed(self, texts: Sequence[str], model: str, input_type: str = "document") -> Embeddings:
        """Embed texts with the embedder of the service.

        Args:
            texts: What to embed.
            model: Name of the embedder, such as `all-MiniLM-L6-v2`; the error for another name tells it.
            input_type: `document`, or `query` for questions.
        """
        return await self._request(calls.embed(texts, model, input_type))

    async def rerank(self, query: str, documents: Sequence[str], top_n: int | None = None) -> RankedTexts:
        """Order texts by how well they answer a query, with the reranker of the service.

        Args:
            query: The query.
            documents: The texts.
            top_n: How many results to return, best first; None for all.
        """
        return await self._request(calls.rerank(query, documents, top_n))

    async def hand_over(self, question: str, **options: Any) -> HandedQuestion:
        """Choose what a question reads, for vLLM to answer it (`ragkv.integrations.vllm`).

        Args:
            question: The question.
            **options: `collection`, `top_k`, `filter`, `method`, as of `ask`; of a chat `history`, a list of
                {"question", "answer"}, and `instructions`.
        """
        return await self._request(calls.hand_over(question, options))

    async def handed_rows(self, asked: Mapping[str, Any]) -> bytes:
        """Return KV that a hand-over names, in the format of safetensors: `tokens`, `k`, `v`.

        Args:
            asked: `kv_transfer_params["ragkv"]` of the hand-over, with its `cache_salt`.
        """
        return await self._request(calls.handed_rows(asked))

    async def answers(self, limit: int = 20, before: float | None = None) -> Briefs:
        """Return the latest answers that the service recorded, newest first.

        Args:
            limit: Largest number of answers.
            before: Only answers recorded before this time, in Unix seconds.
        """
        return await self._request(calls.answers(limit, before))

    async def recall(self, id: str) -> Recalled:
        """Return a recorded answer by the id of its request."""
        return await self._request(calls.recall(id))

    async def map(self, id: str) -> AnswerMap:
        """Return the KV map of a recorded answer by the id of its request."""
        return await self._request(calls.answer_map(id))

    async def conversation(self, id: str, collection: str = "default") -> Conversation:
        """Return the turns of a conversation."""
        return await self._request(calls.conversation(id, collection))

    async def forget(self, id: str, collection: str = "default") -> None:
        """Delete a conversation."""
        await self._request(calls.forget(id, collection))

    # Service

    async def metrics(self) -> str:
        """Return the metrics of the service in the Prometheus text format."""
        return await self._request(calls.metrics())

    async def ready(self) -> bool:
        """Return whether the service answers questions now."""
        try:
            return (await self._http.get("/readyz")).status_code == 200
        except httpx2.TransportError:
            return False

    async def _request(self, call: Call[T]) -> T:
        """Send a request, retry it while the service is busy, and parse the response."""
        retries_left = self._retries
        while True:
            try:
                response = await self._http.request(call.method, call.path, **call.arguments(self._key))
            except httpx2.TransportError as error:
                raise responses.unreachable(self.url, error) from None
            refusal = responses.refusal(response)
            if refusal is None:
                return call.parse(response)
            delay = responses.retry_delay(refusal, retries_left)
            if delay is None:
                raise refusal
            retries_left -= 1
            await asyncio.sleep(delay)

    @asynccontextmanager
    async def _stream(self, call: Call[Any]) -> AsyncIterator[AsyncIterator[httpx2.ServerSentEvent]]:
        """Open an event stream; retry while the service is busy."""
        retries_left = self._retries
        try:
            while True:
                async with self._http.stream(call.method, call.path, **call.arguments(self._key)) as response:
                    if response.is_success:
                        yield aiter(httpx2.EventSource(response))
                        return
                    await response.aread()
                    refusal = responses.refusal(response)
                delay = responses.retry_delay(refusal, retries_left) if refusal else None
                if refusal is not None and delay is None:
                    raise refusal
                retries_left -= 1
                await asyncio.sleep(delay or 0.0)
        except httpx2.TransportError as error:
            raise responses.unreachable(self.url, error) from None
