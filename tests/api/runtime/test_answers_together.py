"""Several clients ask at once: they are answered together and in order, and dropped as soon as they leave."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.engine.engine import Engine
from ragkv.engine.passes import Passes
from ragkv.engine.request import Request
from ragkv.errors import InputError, Stopping
from ragkv.types import AskOptions, Document
from tests.api.conftest import HARBOUR, Service, settings
from tests.api.test_faults import held

QUESTIONS = (
    "Who built the harbour of Tarn?",
    "When was the harbour of Tarn built?",
    "Who painted the bridge of Mell?",
    "What colour is the bridge of Mell?",
)


@contextmanager
def on_prefill(engine_thread: EngineThread, observe: Callable[[str, AskOptions, Request], object]) -> Iterator[None]:
    """Call `observe` after each prefill."""

    def patch(engine: Engine) -> None:
        prefill = engine.prefill_passes

        def observed(request: Request) -> Passes[Request]:
            yield from prefill(request)
            observe(request.question, request.options, request)
            return request

        engine.prefill_passes = observed  # type: ignore[method-assign]

    def restore(engine: Engine) -> None:
        del engine.prefill_passes

    engine_thread.submit(patch).result(30)
    try:
        yield
    finally:
        engine_thread.submit(restore).result(60)


def disable_stops(engine: Engine) -> None:
    """Let answers end at their longest only."""
    engine.model.stop_ids, engine.model.profile = frozenset(), replace(engine.model.profile, stop=())


@contextmanager
def endless(engine_thread: EngineThread) -> Iterator[None]:
    """Answers end at their longest only."""

    def change(engine: Engine) -> tuple[Any, Any]:
        kept = engine.model.stop_ids, engine.model.profile
        disable_stops(engine)
        return kept

    def restore(engine: Engine) -> None:
        engine.model.stop_ids, engine.model.profile = kept

    kept = engine_thread.submit(change).result(30)
    try:
        yield
    finally:
        engine_thread.submit(restore).result(60)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_clients_are_answered_together_and_as_if_they_were_alone(service: Service) -> None:
    engine_thread, running, asked = service.engine_thread, [], AskOptions(method="scout:repair=none")
    alone = [
        engine_thread.submit(lambda engine, q=question: engine.answer(q, asked)).result(60) for question in QUESTIONS
    ]
    with on_prefill(engine_thread, lambda *_: running.append(engine_thread.health()["running"])):
        with held(service):
            together = [engine_thread.ask(question, asked) for question in QUESTIONS]
        assert [future.result(60).answer for future in together] == [answer.answer for answer in alone]
    assert max(running) == 4, "all run at once"
    tokens = [(a.report.tokens, b.result().report.tokens) for a, b in zip(alone, together, strict=True)]
    assert all(a == b for a, b in tokens)
    assert engine_thread.health()["running"] == 0


def test_a_cancelled_answer_is_dropped_before_the_next_step(service: Service) -> None:
    engine_thread, caches = service.engine_thread, []
    with (
        endless(engine_thread),
        on_prefill(engine_thread, lambda *made: caches.append(weakref.ref(made[2].sequence.cache))),
    ):
        before = engine_thread.health()["cancelled"]
        long = engine_thread.ask(QUESTIONS[0], AskOptions(max_tokens=600))
        short = engine_thread.ask(QUESTIONS[2], AskOptions(max_tokens=3))
        assert short.result(60).report.tokens.generated == 3
        assert engine_thread.health()["running"] == 1
        assert long.cancel()
        until(lambda: engine_thread.health()["running"] == 0)
    assert engine_thread.health()["cancelled"] == before + 1
    until(lambda: caches[0]() is None)
    with pytest.raises(CancelledError):
        long.result(1)


def test_a_client_that_hangs_up_frees_its_place(service: Service) -> None:
    engine_thread = service.engine_thread
    with endless(engine_thread):
        before = engine_thread.health()["cancelled"]
        with pytest.raises(httpx.TimeoutException):
            service.post("/v1/answers", {"question": QUESTIONS[0], "max_tokens": 1000}, timeout=1)
        until(lambda: engine_thread.health()["cancelled"] == before + 1)
        assert engine_thread.health()["running"] == 0


def test_a_conversation_is_answered_in_order_and_no_other_question_waits_for_it(service: Service) -> None:
    engine_thread, order = service.engine_thread, []
    pair = AskOptions(conversation="pair")
    with on_prefill(engine_thread, lambda question, *_: order.append(question)):
        with held(service):
            first, second = engine_thread.ask(QUESTIONS[0], pair), engine_thread.ask(QUESTIONS[2], pair)
            other = engine_thread.ask(QUESTIONS[3])
            first.add_done_callback(lambda _: order.append("first answered"))
        answers = [future.result(60) for future in (first, second, other)]
    assert [answer.report.tokens.history > 0 for answer in answers] == [False, True, False]
    assert order.index(QUESTIONS[3]) < order.index(QUESTIONS[2])
    assert order.index("first answered") < order.index(QUESTIONS[2])
    turns = service.client.get("/v1/conversations/pair").json()["turns"]
    assert [turn["question"] for turn in turns] == [QUESTIONS[0], QUESTIONS[2]]
    assert service.client.delete("/v1/conversations/pair").status_code == 204


def test_a_conversation_that_is_removed_during_its_first_turn_stays_removed(service: Service) -> None:
    path = "/v1/conversations/brief"
    with endless(service.engine_thread):
        answer = service.engine_thread.ask(QUESTIONS[0], AskOptions(conversation="brief", max_tokens=50))
        until(lambda: service.engine_thread.health()["running"] == 1)
        assert service.client.delete(path).status_code == 204
        assert answer.result(1).report.tokens.generated == 50
    assert service.client.get(path).status_code == 404


def test_a_question_that_cannot_be_prefilled_fails_alone(service: Service) -> None:
    with held(service):
        futures = [service.engine_thread.ask(question) for question in (QUESTIONS[0], " ", QUESTIONS[1])]
    assert futures[0].result(60).answer
    with pytest.raises(InputError, match="empty"):
        futures[1].result(60)
    assert futures[2].result(60).answer


@contextmanager
def small(data: Path) -> Iterator[EngineThread]:
    """An engine thread that decodes two answers at once, over one document."""
    engine_thread = EngineThread(settings(data, batch=2))
    engine_thread.start().result(60)
    try:
        engine_thread.jobs.submit([Document("harbour", "Tarn", HARBOUR["text"])])
        engine_thread.wake()
        until(lambda: engine_thread.submit(lambda engine: engine.catalog.count()[0]).result(30) == 1)
        yield engine_thread
    finally:
        engine_thread.close(60)


def test_no_more_answers_run_than_the_batch_holds_and_they_start_in_order(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def note(_: str, options: AskOptions, __: Request) -> None:
        seen.append((options.seed, engine_thread.health()["running"]))

    with small(tmp_path) as engine_thread, on_prefill(engine_thread, note):
        waits = threading.Event()
        engine_thread.submit(lambda engine: waits.wait(30))
        futures = [engine_thread.ask(QUESTIONS[place % 2], AskOptions(seed=place)) for place in range(6)]
        waits.set()
        assert all(future.result(60).answer for future in futures)
    assert [place for place, _ in seen] == list(range(6))
    assert max(running for _, running in seen) == 2


def test_at_shutdown_running_answers_are_finished_and_queued_questions_are_rejected(tmp_path: Path) -> None:
    with small(tmp_path) as engine_thread:
        engine_thread.submit(disable_stops).result(30)
        running = [engine_thread.ask(question, AskOptions(max_tokens=60)) for question in QUESTIONS[:2]]
        waiting = engine_thread.ask(QUESTIONS[1])
        until(lambda: engine_thread.health()["running"] == 2)
        engine_thread.close(60)
        assert [future.result(1).report.tokens.generated for future in running] == [60, 60]
        with pytest.raises(Stopping):
            waiting.result(1)
        with pytest.raises(Stopping):
            engine_thread.ask(QUESTIONS[0])
