"""Several who ask at once: answered together, in order, and let go of as soon as they leave."""

from __future__ import annotations

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

from api.runtime.engine_thread import EngineThread
from ragkv.engine.engine import Engine
from ragkv.engine.request import RequestState
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


def beginning(question: str, **more: Any) -> Callable[[Engine], RequestState]:
    return lambda engine: engine.prefill(question, AskOptions(**more))


@contextmanager
def endless(worker: EngineThread) -> Iterator[None]:
    """Answers end at their longest only."""

    def change(engine: Engine) -> tuple[Any, Any]:
        kept = engine.model.stop_ids, engine.model.profile
        engine.model.stop_ids, engine.model.profile = frozenset(), replace(kept[1], stop=())
        return kept

    def back(engine: Engine) -> None:
        engine.model.stop_ids, engine.model.profile = kept

    kept = worker.submit(change).result(30)
    try:
        yield
    finally:
        worker.submit(back).result(60)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_askers_are_answered_together_and_as_if_they_were_alone(service: Service) -> None:
    worker, company = service.worker, []

    def watched(question: str) -> Callable[[Engine], RequestState]:
        def begin(engine: Engine) -> RequestState:
            company.append(worker.health()["running"])
            return engine.prefill(question)

        return begin

    alone = [worker.submit(lambda engine, q=question: engine.answer(q)).result(60) for question in QUESTIONS]
    with held(service):
        together = [worker.ask(watched(question)) for question in QUESTIONS]
    assert [future.result(60).answer for future in together] == [answer.answer for answer in alone]
    assert company == [0, 1, 2, 3]
    tokens = [(a.report.tokens, b.result().report.tokens) for a, b in zip(alone, together, strict=True)]
    assert all(a == b for a, b in tokens)
    assert worker.health()["running"] == 0


def test_a_running_answer_that_is_given_up_is_let_go_of_before_the_next_step(service: Service) -> None:
    worker, caches = service.worker, []

    def begin_long(engine: Engine) -> RequestState:
        begun = engine.prefill(QUESTIONS[0], AskOptions(max_tokens=600))
        caches.append(weakref.ref(begun.sequence.cache))
        return begun

    with endless(worker):
        before = worker.health()["cancelled"]
        long, short = worker.ask(begin_long), worker.ask(beginning(QUESTIONS[2], max_tokens=3))
        assert short.result(60).report.tokens.generated == 3
        assert worker.health()["running"] == 1
        assert long.cancel()
        until(lambda: worker.health()["running"] == 0)
    assert worker.health()["cancelled"] == before + 1
    assert caches[0]() is None
    with pytest.raises(CancelledError):
        long.result(1)


def test_a_client_that_hangs_up_frees_its_place(service: Service) -> None:
    worker = service.worker
    with endless(worker):
        before = worker.health()["cancelled"]
        with pytest.raises(httpx.TimeoutException):
            service.post("/v1/answers", {"question": QUESTIONS[0], "max_tokens": 1000}, timeout=1)
        until(lambda: worker.health()["cancelled"] == before + 1)
        assert worker.health()["running"] == 0


def test_a_turn_waits_for_the_one_before_it_and_nobody_waits_for_that(service: Service) -> None:
    worker, order = service.worker, []

    def noted(name: str, question: str, **more: Any) -> Callable[[Engine], RequestState]:
        def begin(engine: Engine) -> RequestState:
            order.append(name)
            return engine.prefill(question, AskOptions(**more))

        return begin

    turn = ("default", "pair")
    with held(service):
        first = worker.ask(noted("first", QUESTIONS[0], conversation="pair"), turn)
        second = worker.ask(noted("second", QUESTIONS[2], conversation="pair"), turn)
        other = worker.ask(noted("other", QUESTIONS[3]))
        first.add_done_callback(lambda _: order.append("first answered"))
    answers = [future.result(60) for future in (first, second, other)]
    assert [answer.report.tokens.history > 0 for answer in answers] == [False, True, False]
    assert order.index("other") < order.index("second")
    assert order.index("first answered") < order.index("second")
    said = service.client.get("/v1/conversations/pair").json()["turns"]
    assert [turn["question"] for turn in said] == [QUESTIONS[0], QUESTIONS[2]]
    assert service.client.delete("/v1/conversations/pair").status_code == 204


def test_a_conversation_that_is_removed_during_its_first_turn_stays_removed(service: Service) -> None:
    turn, path = ("default", "brief"), "/v1/conversations/brief"
    with endless(service.worker):
        answer = service.worker.ask(beginning(QUESTIONS[0], conversation="brief", max_tokens=50), turn)
        until(lambda: service.worker.health()["running"] == 1)
        assert service.client.delete(path).status_code == 204
        assert answer.result(1).report.tokens.generated == 50
    assert service.client.get(path).status_code == 404


def test_a_question_that_cannot_begin_fails_alone(service: Service) -> None:
    with held(service):
        futures = [service.worker.ask(beginning(question)) for question in (QUESTIONS[0], " ", QUESTIONS[1])]
    assert futures[0].result(60).answer
    with pytest.raises(InputError, match="empty"):
        futures[1].result(60)
    assert futures[2].result(60).answer


@contextmanager
def small(data: Path) -> Iterator[EngineThread]:
    """A worker that runs two answers at once, over one document."""
    worker = EngineThread(settings(data, batch=2))
    worker.start().result(60)
    try:
        worker.jobs.submit([Document("harbour", "Tarn", HARBOUR["text"])])
        worker.wake()
        until(lambda: worker.submit(lambda engine: engine.catalog.count()[0]).result(30) == 1)
        yield worker
    finally:
        worker.close(60)


def test_no_more_than_its_places_run_at_once_and_they_begin_in_order(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def noted(place: int) -> Callable[[Engine], RequestState]:
        def begin(engine: Engine) -> RequestState:
            seen.append((place, worker.health()["running"]))
            return engine.prefill(QUESTIONS[place % 2])

        return begin

    with small(tmp_path) as worker:
        futures = [worker.ask(noted(place)) for place in range(6)]
        assert all(future.result(60).answer for future in futures)
    assert [place for place, _ in seen] == list(range(6))
    assert max(running for _, running in seen) == 1


def test_at_shutdown_the_answers_that_run_are_finished_and_the_line_is_refused(tmp_path: Path) -> None:
    with small(tmp_path) as worker:

        def begin_last(engine: Engine) -> RequestState:
            engine.model.stop_ids, engine.model.profile = frozenset(), replace(engine.model.profile, stop=())
            return engine.prefill(QUESTIONS[0], AskOptions(max_tokens=60))

        running = worker.ask(begin_last), worker.ask(beginning(QUESTIONS[1], max_tokens=60))
        waiting = worker.ask(beginning(QUESTIONS[1]))
        until(lambda: worker.health()["running"] == 2)
        worker.close(60)
        assert [future.result(1).report.tokens.generated for future in running] == [60, 60]
        with pytest.raises(Stopping):
            waiting.result(1)
        with pytest.raises(Stopping):
            worker.ask(beginning(QUESTIONS[0]))
