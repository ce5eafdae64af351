"""What nobody expects ends the loop of the engine's thread; another takes its place, and the service goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ragkv.api.errors import fault_of
from ragkv.api.runtime import engine_thread as module
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.engine.loop import ServingLoop
from ragkv.errors import Restarting
from ragkv.ingest import job_steps
from ragkv.types import AskOptions, Document
from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.api.runtime.test_engine_thread import running, until

QUESTION = "Who built the harbour of Tarn?"


class Broken(BaseException):
    """What no handler of exceptions expects."""


def break_steps(monkeypatch: pytest.MonkeyPatch, broken: threading.Event) -> None:
    """Let the loop die at its next step while the event is set."""
    step = ServingLoop.step

    def breaking(loop: ServingLoop) -> list[float]:
        if broken.is_set():
            raise Broken
        return step(loop)

    monkeypatch.setattr(ServingLoop, "step", breaking)


def test_a_dead_loop_is_replaced_and_its_requests_are_told_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, answers = threading.Event(), list[Any]()
    break_steps(monkeypatch, broken)
    monkeypatch.setattr(module, "PAUSES", (0.0,))
    with serving(settings(tmp_path)) as service:
        assert service.post("/v1/documents?wait=true", HARBOUR).json()["status"] == "completed"
        release = threading.Event()
        service.engine_thread.submit(lambda engine: release.wait(30))
        asking = threading.Thread(target=lambda: answers.append(ask(service)))
        asking.start()
        while not service.engine_thread.health()["waiting"]:
            time.sleep(0.005)
        broken.set()
        release.set()
        asking.join(30)
        broken.clear()
        (answer,) = answers
        assert (answer.status_code, answer.json()["code"]) == (503, "restarting")
        assert int(answer.headers["retry-after"]) >= 1
        assert ask(service).status_code == 200
        health = service.client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert health.json()["replaced"] >= 1
        bridge = {"id": "bridge", "text": "The bridge of Mell is green."}
        assert service.post("/v1/documents?wait=true", bridge).json()["status"] == "completed"
        assert "ragkv_engine_replaced_total" in service.client.get("/metrics").text


def ask(service: Service) -> Any:
    return service.post("/v1/answers", {"question": QUESTION, "max_tokens": 2})


def test_one_that_dies_again_begins_later_and_takes_no_requests_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = threading.Event()
    break_steps(monkeypatch, broken)
    monkeypatch.setattr(module, "PAUSES", (0.0, 3600.0))
    with running(tmp_path) as engine_thread:
        broken.set()
        engine_thread.wake()
        ends = time.monotonic() + 30
        while engine_thread.health()["replaced"] < 2:
            assert time.monotonic() < ends
            time.sleep(0.005)
        broken.clear()
        assert engine_thread.health()["status"] == "failed"
        with pytest.raises(Restarting) as refused:
            engine_thread.ask(QUESTION, AskOptions(max_tokens=1))
        assert 3000 < refused.value.retry_after <= 3601
        assert fault_of(refused.value).headers == {"Retry-After": str(refused.value.retry_after)}
        assert engine_thread.health()["replaced"] == 2, "it waits"


def test_a_document_that_ends_the_loop_is_set_aside_after_two_deaths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = job_steps.ingest_steps

    def deadly(engine: Any, document: Document, check: Any) -> Generator[Any, Any, Any]:
        if document.id == "poison":
            raise SystemExit("of a library")
        return (yield from steps(engine, document, check))

    monkeypatch.setattr(job_steps, "ingest_steps", deadly)
    monkeypatch.setattr(module, "PAUSES", (0.0,))
    with running(tmp_path) as engine_thread:
        documents = [Document(name, name, f"The {name} of Orm is old.") for name in ("mill", "poison", "tower")]
        job_id = engine_thread.jobs.submit(documents)
        engine_thread.wake()
        job = until(engine_thread, job_id, finished=True)
        assert [each.status for each in job.documents] == ["completed", "failed", "completed"]
        (aside,) = engine_thread.jobs.set_aside()
        assert (aside.job_id, aside.collection, aside.document_id) == (job_id, "default", "poison")
        assert "died 2 times" in aside.reason
        assert engine_thread.health()["replaced"] == 2
        assert engine_thread.submit(lambda engine: engine.model.name).result(30) == "tiny"


def test_a_loop_that_dies_beside_an_ingest_counts_as_the_death_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, deaths = EngineThread._take_turn, iter(range(2))

    def dying(self: EngineThread, engine: Any, loop: ServingLoop, ingesting: bool) -> None:
        if ingesting and next(deaths, None) is not None:
            raise Broken
        take(self, engine, loop, ingesting)

    monkeypatch.setattr(EngineThread, "_take_turn", dying)
    monkeypatch.setattr(module, "PAUSES", (0.0,))
    with running(tmp_path) as engine_thread:
        job_id = engine_thread.jobs.submit([Document("mill", "Mill", "The mill of Orm is old.")])
        engine_thread.wake()
        (document,) = until(engine_thread, job_id, finished=True).documents
        assert document.error is not None
        assert (document.status, document.error.code) == ("failed", "interrupted")
        later = engine_thread.jobs.submit([Document("tower", "Tower", "The tower of Orm is old.")])
        engine_thread.wake()
        assert until(engine_thread, later, finished=True).status == "completed"
