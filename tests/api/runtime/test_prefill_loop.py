"""Questions that wait are prefilled together: fewer forwards, in order, each dropped or failed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from api.runtime.answer_history import AnswerHistory
from api.runtime.decode_loop import DecodeLoop
from api.runtime.engine_thread import EngineThread
from api.runtime.request_queue import QueuedQuestion
from ragkv.engine import chunk_flights
from ragkv.engine.engine import Engine
from ragkv.errors import OutOfMemory
from ragkv.metrics.sums import MetricsRecorder
from ragkv.model.layer_pass import Pass
from ragkv.report import Answer
from ragkv.store.base import KVStore
from ragkv.types import AskOptions, Key
from tests.api.conftest import Service
from tests.api.runtime.mixed_requests import open_small
from tests.api.runtime.test_decode_loop import QUESTIONS, on_prefill, until
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


def small_loop(engine: Engine, questions: Sequence[str], tokens: int = 6) -> tuple[DecodeLoop, list[Future[Answer]]]:
    """A loop that has begun with these questions, and their futures."""
    loop, futures = DecodeLoop(engine, MetricsRecorder(), AnswerHistory(0)), list[Future[Answer]]()
    for question in questions:
        futures.append(Future())
        loop.start(QueuedQuestion(question, AskOptions(method="reuse", top_k=3, max_tokens=tokens), futures[-1]))
    return loop, futures


def test_chunks_that_several_questions_miss_are_encoded_once_beside_a_running_answer(tmp_path: Path) -> None:
    asked = [f"Who built the {name} of Tarn?" for name in ("harbour", "bridge", "mill", "quay")]
    with open_small(tmp_path) as engine:
        expected = [engine.answer(each, AskOptions(method="reuse", top_k=3, max_tokens=6)) for each in asked]
        loop, (running,) = small_loop(engine, asked[:1], tokens=60)
        while not loop._running:
            loop.step()
        keys = engine.catalog.keys()
        for key in keys:
            engine.tiers.drop(key)
            engine.store.delete(key)
        encoded: list[int] = []
        beside: list[bool] = []
        stored: list[Key] = []
        forward, put = engine.model.forward, engine.store.put

        def note_write(key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
            stored.append(key)
            put(key, head, body)

        def note_encodings(passes: Sequence[Pass]) -> list[Tensor]:
            captures = [each for each in passes if each.capture is not None and each.capture.keys_too]
            encoded.extend(hash(tuple(each.tokens.tolist())) for each in captures)
            beside.extend([len(passes) > len(captures)] * bool(captures))
            return forward(passes)

        engine.model.forward = note_encodings  # type: ignore[method-assign]
        engine.store.put = note_write  # type: ignore[method-assign]
        try:
            futures = [Future[Answer]() for _ in asked]
            for question, future in zip(asked, futures, strict=True):
                options = AskOptions(method="reuse", top_k=3, max_tokens=6)
                loop.start(QueuedQuestion(question, options, future))
            while loop.count:
                loop.step()
        finally:
            del engine.model.forward
        assert [each.result().answer for each in futures] == [each.answer for each in expected]
        assert len(encoded) == len(set(encoded)) >= 4
        assert len(stored) == len(set(stored)) == len(encoded), "and stored once"
        assert all(beside), "the running answer gets its token in the same forward"
        misses = [each.result().report.cache.misses for each in futures]
        assert sum(misses) >= len(encoded)
        assert running.result().answer


def test_a_fault_of_a_first_pass_ends_no_running_answer(tmp_path: Path) -> None:
    with open_small(tmp_path) as engine:
        loop, (running,) = small_loop(engine, ["Who built the harbour of Tarn?"], tokens=30)
        alone = engine.answer("Who built the harbour of Tarn?", AskOptions(method="reuse", top_k=3, max_tokens=30))
        while not loop._running:
            loop.step()
        bad = Future[Answer]()
        loop.start(QueuedQuestion("Who built the mill?", AskOptions(method="reuse", top_k=2), bad))
        forward = engine.model.forward

        def without_room(passes: Sequence[Pass]) -> list[Tensor]:
            if any(len(each.tokens) > 1 for each in passes):
                raise MemoryError
            return forward(passes)

        engine.model.forward = without_room  # type: ignore[method-assign]
        try:
            while loop.count:
                loop.step()
        finally:
            del engine.model.forward
        assert isinstance(bad.exception(), OutOfMemory)
        assert running.result().answer == alone.answer


@pytest.mark.parametrize("method", ["cacheblend", "multi-infllm"])
def test_every_forward_of_a_plan_that_is_completed_on_the_run_decodes_the_running_answer(
    tmp_path: Path, method: str
) -> None:
    with open_small(tmp_path) as engine:
        loop, (running,) = small_loop(engine, ["Who built the harbour of Tarn?"], tokens=120)
        while not loop._running:
            loop.step()
        asked, beside, forward = Future[Answer](), list[int](), engine.model.forward

        def note(passes: Sequence[Pass]) -> list[Tensor]:
            beside.append(sum(len(each.tokens) == 1 for each in passes))
            return forward(passes)

        loop.start(QueuedQuestion("Who built the mill?", AskOptions(method=method, top_k=3, max_tokens=2), asked))
        engine.model.forward = note  # type: ignore[method-assign]
        try:
            while not asked.done():
                loop.step()
        finally:
            del engine.model.forward
        assert len(beside) > engine.model.shape.layers, "one pass a layer"
        assert not running.done()
        assert min(beside) == 1, "no forward leaves the running answer without a token"


def test_of_questions_that_share_a_forward_which_fails_only_the_one_at_fault_ends(tmp_path: Path) -> None:
    asked = ["Who built the harbour of Tarn?", "Who built the bridge of Tarn?", "Who built the mill of Tarn?"]
    with open_small(tmp_path) as engine:
        expected = [engine.answer(each, AskOptions(method="reuse", top_k=3, max_tokens=6)).answer for each in asked]
        loop, futures = small_loop(engine, asked)
        forward, bad = engine.model.forward, set(engine.model.prompt.question(asked[1]))
        bad -= set(engine.model.prompt.question(asked[0])) | set(engine.model.prompt.question(asked[2]))
        sizes = list[int]()

        def without_room(passes: Sequence[Pass]) -> list[Tensor]:
            sizes.append(len(passes))
            if any(bad & set(each.tokens.tolist()) for each in passes if len(each.tokens) > 1):
                raise MemoryError
            return forward(passes)

        engine.model.forward = without_room  # type: ignore[method-assign]
        try:
            while loop.count:
                loop.step()
        finally:
            del engine.model.forward
        assert bad
        assert sizes[:2] == [3, 1], "together, and then each alone"
        assert [futures[i].result().answer for i in (0, 2)] == [expected[i] for i in (0, 2)]
        assert isinstance(futures[1].exception(), OutOfMemory)


def test_a_pass_that_several_questions_wait_for_and_that_fails_ends_them_once(tmp_path: Path) -> None:
    with open_small(tmp_path) as engine:
        keys = engine.catalog.keys()
        for key in keys:
            engine.tiers.drop(key)
            engine.store.delete(key)
        loop, futures = small_loop(engine, ["Who built the harbour of Tarn?", "When was the harbour of Tarn built?"])
        forward = engine.model.forward

        def fail(passes: Sequence[Pass]) -> list[Tensor]:
            if any(each.capture is not None and each.capture.keys_too for each in passes):
                raise MemoryError
            return forward(passes)

        engine.model.forward = fail  # type: ignore[method-assign]
        try:
            for _ in range(20):
                loop.step()
        finally:
            del engine.model.forward
        assert [type(each.exception(0)) for each in futures] == [OutOfMemory] * 2
