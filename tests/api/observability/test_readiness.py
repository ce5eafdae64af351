"""Liveness and readiness as a load balancer sees them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from ragkv.api.app import create_app
from ragkv.engine.engine import Engine
from ragkv.errors import CatalogCorrupt
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.retrieval import Embedder
from ragkv.retrieval.embedder import _packaged_folder
from ragkv.types import Document, EmbeddedPassages
from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.api.runtime.test_answers_together import until
from tests.api.test_faults import held
from tests.libraries import open_engine
from tests.redis_server import redis_server


def test_a_working_service_is_ready_with_all_checks_ok(service: Service) -> None:
    ready = service.client.get("/readyz")
    assert ready.status_code == 200
    body = ready.json()
    assert body["status"] == "ready"
    assert set(body["checks"]) == {"engine", "catalogue", "index", "store", "reuse", "queue"}
    assert {check["status"] for check in body["checks"].values()} == {"ok"}
    assert set(body["queue"]) == {"places", "waiting", "running", "cancelled", "expired", "refused"}


def test_a_full_queue_degrades_readiness_but_stays_200(service: Service) -> None:
    with held(service):
        waiting = [
            service.engine_thread.submit(lambda engine: None) for _ in range(service.engine_thread.health()["queue"])
        ]
        full = service.client.get("/readyz")
    assert (full.status_code, full.json()["checks"]["queue"]["status"]) == (200, "degraded")
    assert [future.result(30) for future in waiting] == [None] * len(waiting)


def test_a_missing_store_degrades_readiness_but_stays_200(tmp_path: Path) -> None:
    with redis_server() as server:
        pass  # stopped again: nothing listens at its address
    with serving(settings(tmp_path, store=server.url)) as service:
        ready = service.client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["store"]["status"]) == (200, "degraded")
        assert service.client.get("/healthz").json()["status"] == "degraded"


def test_a_change_of_the_embedder_is_told_and_the_service_stays_ready(
    tmp_path: Path, model: DecoderModel, embedder: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other-embedder").symlink_to(_packaged_folder())
    with open_engine(tmp_path / "data", model, embedder, chunk_tokens=128) as engine:
        ingest(engine, Document("harbour", "Tarn", HARBOUR["text"]))
    caplog.set_level("INFO", "ragkv.api")
    gate, encode = threading.Event(), Embedder.encode_passages

    def hold(self: Embedder, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages:
        gate.wait(30)
        return encode(self, passages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedder, "encode_passages", hold)  # documents wait, questions do not
        with serving(settings(tmp_path / "data", embedder=str(tmp_path / "other-embedder"))) as service:
            ready = service.client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "ready")
            index = ready.json()["checks"]["index"]
            assert index["status"] == "degraded"
            assert "all-MiniLM-L6-v2 to other-embedder: 0 of 1 chunks" in index["detail"]
            change = {"from": "all-MiniLM-L6-v2", "to": "other-embedder", "done": 0, "total": 1}
            assert service.client.get("/healthz").json()["reembedding"] == change
            assert "ragkv_reembedding_left 1.0" in service.client.get("/metrics").text
            gate.set()
            until(lambda: service.client.get("/readyz").json()["checks"]["index"]["status"] == "ok")
            assert service.client.get("/healthz").json()["reembedding"] is None
    told = [record.getMessage() for record in caplog.records]
    assert any("all-MiniLM-L6-v2 to other-embedder; searches go on with the earlier embedder" in each for each in told)
    assert "all chunks are embedded with other-embedder" in told


def test_a_damaged_catalogue_makes_the_service_not_ready(tmp_path: Path) -> None:
    def damage(engine: Engine) -> None:
        def damaged() -> tuple[int, int]:
            raise CatalogCorrupt("/data/catalog.sqlite is damaged")

        engine.catalog.count = damaged  # type: ignore[method-assign]

    with serving(settings(tmp_path)) as service:
        service.engine_thread.submit(damage).result(30)
        service.engine_thread._health.examined = 0.0
        service.engine_thread.wake()
        until(lambda: service.client.get("/readyz").status_code == 503)
        checks = service.client.get("/readyz").json()["checks"]
        told = "the catalogue of the service is damaged; its log has the details"
        assert checks["catalogue"] == checks["engine"] == {"status": "failed", "detail": told}
        assert service.client.get("/healthz").json()["reason"] == told


def test_a_stopping_service_is_not_ready(tmp_path: Path) -> None:
    app = create_app(settings(tmp_path))

    async def session() -> list[int]:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client,
        ):
            seen = [(await client.get("/readyz")).status_code]
            app.state.engine_thread.pause()
            return [*seen, (await client.get("/readyz")).status_code, (await client.get("/healthz")).status_code]

    assert asyncio.run(session()) == [200, 503, 200]
