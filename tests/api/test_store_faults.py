"""Store faults as operators and tenants see them: a line in the log, a degraded health, codes in reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.redis_server import redis_server

ASK = {"question": "Who built the harbour of Tarn?", "max_tokens": 1}


def ask(service: Service) -> Any:
    answer = service.post("/v1/answers", ASK)
    assert answer.status_code == 200, answer.text
    return answer.json()


def reasons(service: Service) -> set[str]:
    return {fallback["reason"] for fallback in ask(service)["report"]["cache"]["fallbacks"]}


def health(service: Service, expected: str) -> Any:
    """Wait until the health is examined again; return it."""
    service.engine_thread._health.examined = 0.0
    service.engine_thread.wake()
    until = time.monotonic() + 10
    while (found := service.client.get("/healthz")).json()["status"] != expected and time.monotonic() < until:
        time.sleep(0.05)
    assert (found.status_code, found.json()["status"]) == (200, expected), found.text
    return found.json()


def lines(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    return [text for record in caplog.records if f"KV store: {kind}," in (text := record.getMessage())]


def test_a_report_and_the_health_name_codes_and_no_addresses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ragkv")
    with redis_server() as server, serving(settings(tmp_path, store=server.url)) as service:
        service.post("/v1/documents?wait=true", HARBOUR)
        assert reasons(service) == set()
        server.process.kill()
        server.process.wait()
        answer = service.post("/v1/answers", ASK)
        assert {each["reason"] for each in answer.json()["report"]["cache"]["fallbacks"]} == {"unavailable"}
        health(service, "degraded")
        for text in (answer.text, service.client.get("/healthz").text, service.client.get("/readyz").text):
            assert str(server.port) not in text
            assert str(tmp_path) not in text
        assert service.client.get("/readyz").json()["checks"]["store"]["status"] == "degraded"
    (line,) = lines(caplog, "unavailable")
    assert str(server.port) in line, "the log names the server"


def test_a_flushed_redis_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import redis

    caplog.set_level(logging.WARNING, "ragkv")
    with redis_server() as server, serving(settings(tmp_path, store=server.url)) as service:
        service.post("/v1/documents?wait=true", HARBOUR)
        with redis.Redis(port=server.port) as client:
            client.flushall()
        assert reasons(service) == {"missing"}
        assert len(lines(caplog, "missing")) == 1
        assert reasons(service) == set(), "it was stored again"
        found = service.engine_thread.submit(lambda engine: engine.health()).result(30)
        assert (found["status"], found["faults"]) == ("ok", {"missing": 1})


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [flip, replace_by_folder])
def test_a_damaged_entry_is_in_the_log_and_the_health_and_heals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    caplog.set_level(logging.WARNING, "ragkv")
    with serving(settings(tmp_path)) as service:
        service.post("/v1/documents?wait=true", HARBOUR)
        (file,) = tmp_path.glob("kv/??/*.kv")
        damage(file)
        service.post("/v1/answers", {**ASK, "method": "reuse"})
        assert "corrupt" in health(service, "degraded")["store"]
        assert len(lines(caplog, "corrupt")) == 1
        assert reasons(service) == set(), "it was stored again"
        assert file.is_file()


def test_a_document_whose_kv_finds_no_room_is_completed_and_the_health_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ragkv")
    with serving(settings(tmp_path, store_bytes=1000)) as service:
        assert service.post("/v1/documents?wait=true", HARBOUR).json()["status"] == "completed"
        assert "Ad" in ask(service)["answer"]
        told = health(service, "degraded")
        assert told["store"].startswith("full: ")
        assert told["store_faults"] >= 1
        assert len(lines(caplog, "full")) == 1
