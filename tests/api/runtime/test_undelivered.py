"""Answers that are on their way when one of their documents goes: they begin again, or end."""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ragkv.api.runtime.answer_stream import AnswerStream
from ragkv.api.runtime.undelivered import AnswerOrigin, UndeliveredAnswers
from ragkv.engine import loop
from ragkv.engine.engine import Engine
from ragkv.errors import Outdated, StoreUnavailable
from ragkv.ingest.pipeline import ingest
from ragkv.ingest.pipeline import remove as remove_document
from ragkv.types import AskOptions, Document
from tests.api.conftest import Service
from tests.api.runtime.test_answers_together import endless, on_prefill, until
from tests.libraries import open_engine

MILL, QUAY = "The mill of Orm was built by Ida Falk.", "The quay of Orm was paved by Sten Berg."
QUESTION = "Who built the mill of Orm?"


@pytest.fixture
def collection(service: Service) -> str:
    """Name of a new collection with two documents."""
    name = f"undelivered-{uuid.uuid4().hex[:8]}"
    documents = [{"id": id, "text": text, "collection": name} for id, text in (("mill", MILL), ("quay", QUAY))]
    assert service.post("/v1/documents?wait=true", {"documents": documents}).status_code == 200
    return name


def deleted(service: Service, collection: str, id: str = "mill") -> None:
    """Delete a document over HTTP."""
    assert service.client.delete(f"/v1/documents/{id}?collection={collection}").status_code == 204


def removed_beside(service: Service, collection: str) -> None:
    """Delete a document as another process does."""
    with another_process(service) as beside:
        remove_document(beside, collection, "mill")


@contextmanager
def another_process(service: Service) -> Iterator[Engine]:
    """A second engine on the same folder. It shares the model, so it must not compute beside the service."""
    model, embedder = service.engine_thread.submit(lambda engine: (engine.model, engine.retriever.embedder)).result(30)
    with open_engine(service.app.state.settings.data, model, embedder) as beside:
        yield beside


@pytest.mark.parametrize("remove", [deleted, removed_beside])
@pytest.mark.parametrize("path", ["/v1/answers", "/v1/chat/completions"])
def test_a_stream_ends_with_an_error_when_a_document_that_it_was_read_from_goes(
    service: Service, collection: str, remove: Callable[[Service, str], None], path: str
) -> None:
    body: dict[str, Any] = {"question": QUESTION, "collection": collection, "max_tokens": 1000}
    if path != "/v1/answers":
        body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1000}
        body["ragkv"] = {"collection": collection}
    with endless(service.engine_thread), service.client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data:"))
        for _ in range(5):
            next(lines)
        remove(service, collection)
        last = list(lines)[-1]
        assert '"document_changed"' in last
        assert MILL not in last
        until(lambda: service.engine_thread.health()["running"] == 0)


def test_a_slow_reader_of_a_finished_answer_gets_no_more_of_it(service: Service, collection: str) -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    async def read_slowly() -> None:
        options = AskOptions(collection=collection)
        stream = AnswerStream(service.engine_thread, never, QUESTION, options, "", 60, True)
        try:
            await stream.prefilled()
            while service.engine_thread.health()["running"]:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(deleted, service, collection)
            for take in (stream.answer, stream.check):
                with pytest.raises(Outdated):
                    take()
            with pytest.raises(Outdated):
                await anext(stream.pieces())
        finally:
            stream.cancel()

    asyncio.run(read_slowly())


def test_a_question_whose_documents_go_all_the_time_ends_with_an_error_to_repeat(
    service: Service, collection: str
) -> None:
    begun = list[str]()

    def replace(*prefilled: object) -> None:
        begun.append(QUESTION)
        text = f"The mill of Orm was built by number {len(begun)}."
        ingest(beside, Document("mill", "Mill", text, {}, collection))

    with another_process(service) as beside, on_prefill(service.engine_thread, replace):
        refused = service.post("/v1/answers", {"question": QUESTION, "collection": collection})
    assert len(begun) == loop.ATTEMPTS
    assert (refused.status_code, refused.json()["code"]) == (503, "document_changed")
    assert int(refused.headers["retry-after"]) > 0


def test_a_conversation_says_at_its_next_turn_and_in_its_turns_what_was_removed(
    service: Service, collection: str
) -> None:
    ask = {"collection": collection, "conversation_id": "mills", "top_k": 1}
    first = service.post("/v1/answers", {"question": QUESTION, **ask}).json()
    assert "Falk" in str(first["citations"])
    deleted(service, collection)
    second = service.post("/v1/answers", {"question": "And who paved the quay?", **ask}).json()
    assert second["report"]["removed_turns"] == 1
    assert "Falk" not in str(second)
    shown = service.client.get(f"/v1/conversations/mills?collection={collection}").json()["turns"]
    assert [(turn["question"], turn["removed"]) for turn in shown] == [(QUESTION, True), (second["question"], False)]
    assert shown[0]["answer"] == ""


def test_states_of_conversations_leave_memory_when_another_process_removes_a_document(
    service: Service, collection: str
) -> None:
    asked = {"question": QUESTION, "collection": collection, "conversation_id": "held", "top_k": 1, "method": "full"}
    service.post("/v1/answers", asked)

    def kept(engine: Engine) -> bool:
        return engine.sessions.cache.get(collection, "held") is not None

    assert service.engine_thread.submit(kept).result(30)
    removed_beside(service, collection)
    service.engine_thread.wake()
    until(lambda: not service.engine_thread.submit(kept).result(30))


class Catalogue:
    """Knows which rows stand, if it answers at all."""

    def __init__(self) -> None:
        self.rows, self.down = {1, 2, 3}, False

    def standing(self, collection: str, rows: frozenset[int]) -> set[int]:
        if self.down:
            raise StoreUnavailable("down")
        return self.rows & rows


def test_an_origin_is_outdated_by_its_own_chunks_only_and_forgotten_with_its_answer() -> None:
    catalogue = Catalogue()
    undelivered = UndeliveredAnswers(catalogue)  # type: ignore[arg-type]
    one, other = AnswerOrigin(), AnswerOrigin()
    undelivered.add(one, "a", frozenset({1, 2}))
    undelivered.add(other, "a", frozenset({3}))
    catalogue.rows.discard(3)
    undelivered.check({"b"})
    assert not other.outdated
    undelivered.check({"a"})
    assert (one.outdated, other.outdated) == (False, True)
    late = AnswerOrigin()
    undelivered.add(late, "a", frozenset({3}))
    assert late.outdated, "the chunk went before its answer was noted"
    del other, late
    gc.collect()
    assert list(undelivered._origins) == [one]


def test_what_cannot_be_checked_is_not_delivered() -> None:
    catalogue, origin = Catalogue(), AnswerOrigin()
    undelivered = UndeliveredAnswers(catalogue)  # type: ignore[arg-type]
    undelivered.add(origin, "a", frozenset({1}))
    catalogue.down = True
    undelivered.check({"a"})
    assert origin.outdated


def test_a_future_fails_with_what_happened(service: Service, collection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ATTEMPTS", 1)
    origin, channel = AnswerOrigin(), None
    with endless(service.engine_thread):
        options = AskOptions(collection=collection, max_tokens=1000)
        future = service.engine_thread.ask(QUESTION, options, channel=channel, origin=origin)
        until(lambda: bool(origin.rows))
        deleted(service, collection)
        with pytest.raises(Outdated):
            future.result(60)
