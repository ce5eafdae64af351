"""The client that waits for every answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class Client:
    """Of one service. Thread-safe, as httpx2's client is. Every method raises Refused and Unreachable."""

    def __init__(self, url: str, key: str = "", timeout: float = calls.TIMEOUT, retries: int = calls.RETRIES):
        """url: of the service, like http://127.0.0.1:8000 · key: an API key, where it wants one · timeout: seconds for
        one answer · retries: how often a service that is busy is asked again, after as long as it says."""
        self.url, self._retries = url.rstrip("/"), retries
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def put(
        self,
        id: str,
        text: str,
        title: str = "",
        metadata: Mapping[str, Any] | None = None,
        collection: str = "default",
    ) -> Document:
        """Have a document say this, and wait until it has been read. One that says it already costs nothing."""
        return self._do(calls.put(id, text, title, metadata, collection))

    def send(self, documents: Sequence[Mapping[str, Any]], collection: str = "default") -> str:
        """Queue documents {"id", "text", "title"?, "metadata"?}, at most 1000, as a job; returns its id."""
        return self._do(calls.send(documents, collection))

    def upload(
        self,
        paths: Sequence[Path],
        names: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        collection: str = "default",
    ) -> str:
        """Queue files as a job; returns its id. names: what they are called there, their ids; default: their names.

        Raises OSError for a file that cannot be read.
        """
        return self._do(calls.upload(paths, names or [path.name for path in paths], metadata, collection))

    def documents(self, collection: str = "default", filter: Filter | None = None) -> Iterator[Document]:
        """All documents of a collection, by id; pages are fetched on the way."""
        after: str | None = ""
        while after is not None:
            found = self.page(collection, 100, after, filter)
            yield from found.documents
            after = found.after

    def page(self, collection: str = "default", limit: int = 20, after: str = "", filter: Filter | None = None) -> Page:
        """Documents of a collection, by id, those behind `after`."""
        return self._do(calls.page(collection, limit, after, filter))

    def document(self, id: str, collection: str = "default", text: bool = False) -> Document:
        """One document; with its text where that is wanted."""
        return self._do(calls.document(id, collection, text))

    def remove(self, id: str, collection: str = "default") -> None:
        """Forget a document, at any time."""
        self._do(calls.remove(id, collection))

    def job(self, id: str, all: bool = False) -> Job:
        """How far a job is. all: with all of its documents, not only the first 20 that failed."""
        return self._do(calls.job(id, all))

    def jobs(self, limit: int = 20) -> tuple[Job, ...]:
        """The latest jobs, newest first."""
        return self._do(calls.jobs(limit))

    def cancel(self, id: str) -> Job:
        """Stop a job; documents that are in stay in."""
        return self._do(calls.cancel(id))

    def follow(self, id: str) -> Iterator[Job]:
        """The job whenever it has changed, until it is done; a stream that breaks off is taken up again."""
        while True:
            with self._events(calls.follow(id)) as events:
                for event in events:
                    found = calls.job_of(event)
                    if found is not None:
                        yield found
                    if found is not None and found.finished is not None:
                        return

    def wait(self, id: str) -> Job:
        """The job, once it is done."""
        last: Job | None = None
        for found in self.follow(id):
            last = found
        if last is None:
            raise calls.unreachable(self.url, EOFError("its events ended"))
        return last

    def collections(self) -> tuple[Collection, ...]:
        """The collections that have documents."""
        return self._do(calls.collections())

    def remove_collection(self, name: str) -> None:
        """Forget a collection: documents, what waits for it, conversations."""
        self._do(calls.remove_collection(name))

    def ask(self, question: str, **options: Unpack[Options]) -> Answer:
        """Answer a question."""
        return self._do(calls.ask(question, False, options))

    def stream(self, question: str, **options: Unpack[Options]) -> Iterator[Event]:
        """As `ask`, in pieces, while it is decoded. Whoever stops reading should close the iterator: the service then
        stops, too."""
        with self._events(calls.ask(question, True, options)) as events:
            for event in events:
                found = calls.event_of(event)
                if found is not None:
                    yield found

    def answers(self, limit: int = 20, before: float | None = None) -> Briefs:
        """The latest answers that the service remembers, newest first, those before that moment."""
        return self._do(calls.answers(limit, before))

    def recall(self, id: str) -> Recalled:
        """A remembered answer, by the id of its request."""
        return self._do(calls.recall(id))

    def map(self, id: str) -> AnswerMap:
        """What a remembered answer was read from."""
        return self._do(calls.answer_map(id))

    def conversation(self, id: str, collection: str = "default") -> Conversation:
        """What was said in a conversation."""
        return self._do(calls.conversation(id, collection))

    def forget(self, id: str, collection: str = "default") -> None:
        """Forget a conversation."""
        self._do(calls.forget(id, collection))

    def metrics(self) -> str:
        """What it counts, of all who ask, as Prometheus text."""
        return self._do(calls.metrics())

    def ready(self) -> bool:
        """Whether questions are answered now."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    def _do(self, call: Call[T]) -> T:
        tries = self._retries
        while True:
            try:
                response = self._http.request(call.method, call.path, **call.given)
            except httpx2.TransportError as error:
                raise calls.unreachable(self.url, error) from None
            fault = calls.refused(response)
            if fault is None:
                return call.read(response)
            wait = calls.again(fault, tries)
            if wait is None:
                raise fault
            tries -= 1
            time.sleep(wait)

    @contextmanager
    def _events(self, call: Call[Any]) -> Iterator[Iterator[httpx2.ServerSentEvent]]:
        tries = self._retries
        try:
            while True:
                with self._http.stream(call.method, call.path, **call.given) as response:
                    if response.is_success:
                        yield iter(httpx2.EventSource(response))
                        return
                    response.read()
                    fault = calls.refused(response)
                wait = calls.again(fault, tries) if fault else None
                if fault is not None and wait is None:
                    raise fault
                tries -= 1
                time.sleep(wait or 0.0)
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from None
