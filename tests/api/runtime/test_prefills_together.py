"""Questions that wait are prefilled together: fewer forwards, in order, each dropped or failed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.engine import chunk_flights
from ragkv.engine.engine import Engine
from ragkv.model.layer_pass import Pass
from ragkv.store.base import KVStore
from ragkv.types import AskOptions, Key
from tests.api.conftest import Service
from tests.api.runtime.test_answers_together import QUESTIONS, on_prefill, until
from tests.api.test_faults import held

ASKED = [*QUESTIONS, *(question.replace("?", " then?") for question in QUESTIONS)]


@contextmanager
def forwards(engine_thread: EngineThread, group_tokens: int | None = None) -> Iterator[list[list[int]]]:
    """The rows of the passes of every forward inside the block. group_tokens: replaces that of the engine."""
    seen: list[list[int]] = []
    kept: list[int] = []

    def watch(engine: Engine) -> None:
        forward = engine.model.forward
        kept.append(engine.group_tokens)
        engine.group_tokens = group_tokens or engine.group_tokens

        def recorded(passes: Sequence[Pass]) -> list[Tensor]:
            seen.append([len(each.tokens) for each in passes])
            return forward(passes)

        engine.model.forward = recorded  # type: ignore[method-assign]

    def restore(engine: Engine) -> None:
        engine.group_tokens = kept[0]
        engine.model.__dict__.pop("forward")

    engine_thread.submit(watch).result(30)
    try:
        yield seen
    finally:
        engine_thread.submit(restore).result(60)


def ask_all(service: Service, questions: Sequence[str], **options: int) -> list[str]:
    """Ask questions that all wait before the first begins; return the answers."""
    with held(service):
        futures = [service.engine_thread.ask(question, AskOptions(max_tokens=2, **options)) for question in questions]
    return [future.result(60).answer for future in futures]


def test_eight_questions_take_less_than_half_of_the_forwards_that_they_take_alone(service: Service) -> None:
    with forwards(service.engine_thread) as alone:
        expected = [ask_all(service, [question])[0] for question in ASKED]
    with forwards(service.engine_thread) as together:
        assert ask_all(service, ASKED) == expected
    first_passes = [rows for rows in together if max(rows) > 1]
    assert max(map(len, first_passes)) >= 4, "several questions share a forward"
    assert 2 * len(together) < len(alone)
    assert sum(map(sum, together)) == sum(map(sum, alone)), "with the same rows"


def test_a_forward_has_no_more_rows_than_a_group_unless_one_pass_has(service: Service) -> None:
    with forwards(service.engine_thread, group_tokens=50) as seen:
        ask_all(service, QUESTIONS)
    assert any(len(rows) > 1 for rows in seen if max(rows) > 1)
    assert all(sum(rows) <= 50 for rows in seen if len(rows) > 1)


def test_others_go_on_while_a_question_waits_for_a_chunk_that_another_process_encodes(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_flights, "LEAST_WAIT", 100.0)
    mill = {"id": "mill", "text": "The mill of Tarn was built by Ivo Marsh.", "collection": "mills"}
    assert service.post("/v1/documents?wait=true", mill).json()["status"] == "completed"

    def lose(engine: Engine) -> tuple[KVStore, Key]:
        key = engine.key(engine.catalog.chunks_of("mills", "mill")[0], "mills")
        engine.store.delete(key)
        assert engine.store.leases.take(key, "another process", 100) == "taken"
        return engine.store, key

    store, key = service.engine_thread.submit(lose).result(30)
    waiting = service.engine_thread.ask("Who built the mill?", AskOptions(max_tokens=2, collection="mills"))
    ask_all(service, QUESTIONS)
    assert not waiting.done()
    store.leases.release(key, "another process")
    assert waiting.result(60).report.cache.misses == 1
    assert service.client.delete("/v1/documents/mill?collection=mills").status_code < 300


def test_questions_become_ready_in_the_order_in_which_they_came(service: Service) -> None:
    order: list[int] = []
    with (
        forwards(service.engine_thread, group_tokens=1),
        on_prefill(service.engine_thread, lambda _, options, __: order.append(options.seed)),
        held(service),
    ):
        futures = [service.engine_thread.ask(each, AskOptions(seed=i)) for i, each in enumerate(QUESTIONS)]
    assert all(future.result(60).answer for future in futures)
    assert order == [0, 1, 2, 3]


def test_a_client_that_leaves_while_its_question_is_prefilled_is_dropped_alone(service: Service) -> None:
    engine_thread = service.engine_thread
    before = engine_thread.health()["cancelled"]

    def leave(engine: Engine) -> None:
        forward = engine.model.forward

        def leaving(passes: Sequence[Pass]) -> list[Tensor]:
            engine.model.__dict__.pop("forward")
            futures[1].cancel()
            return forward(passes)

        engine.model.forward = leaving  # type: ignore[method-assign]

    with held(service):
        engine_thread.submit(leave)
        futures = [engine_thread.ask(question) for question in QUESTIONS[:3]]
    assert [futures[i].result(60).answer for i in (0, 2)]
    assert futures[1].cancelled()
    until(lambda: engine_thread.health()["running"] == 0)
    assert engine_thread.health()["cancelled"] == before + 1


@pytest.mark.parametrize("count", [1, 4])
def test_questions_that_wait_are_embedded_together(service: Service, count: int) -> None:
    calls: list[int] = []

    def watch(engine: Engine) -> None:
        embedder = engine.retriever.embedder
        encode = embedder.encode_queries
        embedder.encode_queries = lambda texts: calls.append(len(texts)) or encode(texts)  # type: ignore[method-assign,func-returns-value]

    service.engine_thread.submit(watch).result(30)
    try:
        ask_all(service, [f"{question} {count}" for question in QUESTIONS[:count]])  # vectors of questions are kept
    finally:
        service.engine_thread.submit(lambda engine: engine.retriever.embedder.__dict__.pop("encode_queries")).result(30)
    assert calls == [count]
