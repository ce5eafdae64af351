"""The thread that owns the engine: order, shutdown and what the next start finds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragkv.api.app import create_app
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.catalog import Catalog
from ragkv.engine.engine import Engine
from ragkv.errors import CatalogCorrupt, ModelNotFound, Stopping
from ragkv.ingest.jobs import IngestJob, Jobs
from ragkv.model import source
from ragkv.types import AskOptions, Document
from tests.api.conftest import Service, settings
from tests.redis_server import redis_server

TALE = "\n\n".join(
    f"Chapter {n}. The keeper of the light counted {n} ships before the fog came down." for n in range(40)
)


@contextmanager
def running(data: Path, **more: str) -> Iterator[EngineThread]:
    engine_thread = EngineThread(settings(data, **more))
    engine_thread.start().result(60)
    try:
        yield engine_thread
    finally:
        engine_thread.close(60)


def until(engine_thread: EngineThread, job_id: str, *, stage: str = "", finished: bool = False) -> IngestJob:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        job = engine_thread.jobs.get(job_id)
        if (finished and job.finished) or (stage and job.stage == stage):
            return job
        time.sleep(0.01)
    raise TimeoutError(job)


def test_a_request_cancelled_before_its_turn_never_runs(service: Service) -> None:
    release, ran = threading.Event(), threading.Event()
    held = service.engine_thread.submit(lambda engine: release.wait(30))
    unwanted = service.engine_thread.submit(lambda engine: ran.set())
    assert unwanted.cancel()
    release.set()
    assert held.result(30)
    assert service.engine_thread.submit(lambda engine: "next").result(30) == "next"
    assert not ran.is_set()


def test_a_request_that_fails_leaves_the_thread_running(service: Service) -> None:
    with pytest.raises(ZeroDivisionError):
        service.engine_thread.submit(lambda engine: 1 / 0).result(30)
    assert service.engine_thread.submit(lambda engine: engine.model.name).result(30) == "tiny"


def test_endless_requests_do_not_keep_documents_from_being_ingested(tmp_path: Path) -> None:
    with running(tmp_path) as engine_thread:
        done = threading.Event()

        def ask_again(engine: Engine) -> None:
            if not done.is_set():
                engine_thread.submit(ask_again)
                time.sleep(0.001)

        for _ in range(4):
            engine_thread.submit(ask_again)
        job_id = engine_thread.jobs.submit([Document("tale", "Tale", TALE[:600])])
        engine_thread.wake()
        try:
            assert until(engine_thread, job_id, finished=True).status == "completed"
        finally:
            done.set()


def test_shutdown_queues_a_document_again_and_the_next_start_ingests_it(tmp_path: Path) -> None:
    with running(tmp_path) as engine_thread:
        job_id = engine_thread.jobs.submit([Document("tale", "Tale", TALE)])
        engine_thread.wake()
        until(engine_thread, job_id, stage="encode")
        waiting = engine_thread.submit(lambda engine: "answered")
        started = time.monotonic()
        engine_thread.pause()
        with pytest.raises(Stopping):
            engine_thread.submit(lambda engine: None)
        assert waiting.result(30) == "answered"
        engine_thread.close(60)
        assert time.monotonic() - started < 10
        assert engine_thread.health()["status"] == "failed"
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    job = Jobs(catalog, 1).get(job_id)
    assert (job.status, catalog.find("default", "tale")) == ("queued", None)
    catalog.close()
    with running(tmp_path) as engine_thread:
        assert until(engine_thread, job_id, finished=True).status == "completed"
        answer = engine_thread.submit(
            lambda engine: engine.answer("What did the keeper count?", AskOptions(max_tokens=1))
        ).result(30)
        assert answer.report.cache.misses == 0


def test_without_its_kv_store_the_service_is_degraded_and_answers(tmp_path: Path) -> None:
    with redis_server() as server:
        pass  # stopped again: nothing listens there
    with running(tmp_path, store=server.url) as engine_thread:
        assert engine_thread.health()["status"] == "degraded"
        job_id = engine_thread.jobs.submit([Document("tale", "Tale", TALE[:300])])
        engine_thread.wake()
        assert until(engine_thread, job_id, finished=True).status == "completed"
        answer = engine_thread.submit(
            lambda engine: engine.answer("What did the keeper count?", AskOptions(max_tokens=1))
        ).result(30)
        assert len(answer.report.cache.fallbacks) == len(answer.report.chunks) > 0


def test_an_unknown_model_stops_the_start(tmp_path: Path) -> None:
    app = create_app(settings(tmp_path, model=str(tmp_path / "no-model")))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pytest.fail("started without a model")

    with pytest.raises(ModelNotFound, match="no-model"):
        asyncio.run(start())


def test_the_log_says_why_the_small_model_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    monkeypatch.delenv("RAGKV_MODEL")
    with running(tmp_path) as engine_thread:
        assert engine_thread.model == source.TINY
    (line,) = [record.getMessage() for record in caplog.records if source.INSTALL in record.getMessage()]
    assert line.startswith("the small model tiny answers")


def test_a_damaged_catalogue_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"this was a catalogue" * 100)
    engine_thread = EngineThread(settings(tmp_path))
    with pytest.raises(CatalogCorrupt):
        engine_thread.start().result(60)
    engine_thread.close(10)
    assert (tmp_path / "catalog.sqlite").read_bytes().startswith(b"this was")
