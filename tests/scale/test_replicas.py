"""`ragkv serve --replicas`: real Ray, real replicas of one thread each, over one data folder."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ragkv.client import Client
from ragkv.metrics.prometheus import parse_metrics
from tests.api.conftest import BRIDGE, HARBOUR
from tests.scale.replicated import (
    QUESTION,
    Load,
    Replicated,
    descendants,
    replica_processes,
    replicated,
    running,
    wait_until,
)

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.scale, pytest.mark.timeout(500)]

QUOTA = 100_000
BACK_SECONDS = 60.0
"""Longest time until a killed replica is back. A machine with other work starts processes slowly."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    """Two replicas, which know a harbour and a bridge, and let a tenant send QUOTA bytes a minute."""
    with replicated(tmp_path_factory.mktemp("replicas"), RAGKV_TENANT_BYTES=str(QUOTA)) as running:
        sent = running.client.post("/v1/documents?wait=true", json={"documents": [HARBOUR, BRIDGE]})
        assert sent.json()["status"] == "completed"
        yield running


def test_a_document_of_one_replica_is_answered_from_stored_kv_by_the_other(service: Replicated) -> None:
    one, other = service.replicas
    body = {"text": "The mill of Orrin was bought in 1902 by Kit Marlow.", "title": "Orrin"}
    sent = service.client.put("/v1/documents/mill?wait=true", json=body, headers=service.key(one))
    assert sent.status_code == 200, sent.text
    before = service.counts("ragkv_answers_total")
    started = time.monotonic()
    answer = service.ask(service.key(other), question="Who bought the mill of Orrin?").json()
    assert time.monotonic() - started < 10
    assert "mill" in {each["document_id"] for each in answer["citations"]}
    assert sum(answer["report"]["cache"]["hits"].values()) == answer["report"]["cache"]["chunks"]
    assert service.counts("ragkv_answers_total") - before == {other: 1}


def test_an_answer_is_streamed_as_it_is_decoded(service: Replicated) -> None:
    for replica in service.replicas:
        times: dict[str, float] = {}
        body = {**QUESTION, "stream": True}
        with service.client.stream("POST", "/v1/answers", json=body, headers=service.key(replica)) as response:
            for line in response.iter_lines():
                if line.startswith("event: "):
                    times.setdefault(line[7:], time.monotonic())
        assert list(times) == ["retrieval", "token", "citation", "report", "done"]
        assert times["token"] < times["done"]


def test_a_conversation_has_one_replica(service: Replicated) -> None:
    with Client(str(service.client.base_url)) as client:
        for name in ("harbour", "bridge", "mell"):
            before = service.counts("ragkv_answers_total")
            for question in ("Who built the harbour of Tarn?", "And when?"):
                client.ask(question, conversation_id=name, method="scout", max_tokens=8)
            assert list((service.counts("ragkv_answers_total") - before).values()) == [2], name
            assert len(client.conversation(name).turns) == 2


def test_questions_of_a_conversation_at_two_replicas_at_once_are_all_kept(service: Replicated) -> None:
    for round in (1, 2):
        answers: list[httpx.Response] = []

        def ask(replica: str, answers: list[httpx.Response] = answers) -> None:
            answers.append(service.ask(service.key(replica), conversation_id="both"))

        threads = [threading.Thread(target=ask, args=(replica,)) for replica in service.replicas * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ["Ada Brook" in answer.json()["answer"] for answer in answers] == [True] * 4
        turns = service.client.get("/v1/conversations/both").json()["turns"]
        assert len(turns) == 4 * round


def test_every_replica_knows_the_answers_of_all_until_their_conversation_is_deleted(service: Replicated) -> None:
    one, other = service.replicas
    answered = service.ask(service.key(one), conversation_id="short").headers["x-request-id"]
    for replica in (one, other):
        headers = service.key(replica)
        assert service.client.get(f"/v1/answers/{answered}", headers=headers).status_code == 200
        assert service.client.get(f"/v1/answers/{answered}/map", headers=headers).json()["chunks"]
        listed = service.client.get("/v1/answers?limit=100", headers=headers).json()["answers"]
        assert answered in {each["id"] for each in listed}
        assert [each["when"] for each in listed] == sorted((each["when"] for each in listed), reverse=True)
    assert service.client.delete("/v1/conversations/short", headers=service.key(other)).status_code == 204
    for replica in (one, other):
        assert service.client.get(f"/v1/answers/{answered}", headers=service.key(replica)).status_code == 404


def test_the_metrics_are_those_of_all_replicas(service: Replicated) -> None:
    shown = service.client.get("/metrics").text
    assert set(service.counts("process_start_time_seconds")) == set(service.replicas)
    assert len(re.findall(r"^ragkv_documents\{", shown, re.MULTILINE)) == 1
    assert len(re.findall(r"^# TYPE ragkv_answers_total ", shown, re.MULTILINE)) == 1
    scraped = parse_metrics(shown)
    assert sum(scraped.sums.answers.values()) == service.counts("ragkv_answers_total").total()
    assert scraped.queue_places == 64
    assert not scraped.wrong


def test_a_tenant_has_one_limit_for_all_replicas(service: Replicated) -> None:
    def left(replica: str) -> int:
        fields = service.client.get("/v1/jobs", headers=service.key(replica)).headers["ratelimit"]
        found = re.search(r'"bytes";r=(\d+)', fields)
        assert found
        return int(found[1])

    one, other = service.replicas
    wait_until(lambda: left(other) > 0.9 * QUOTA, 60)
    refused = service.client.post("/v1/documents", json={"padding": "x" * (QUOTA // 2)}, headers=service.key(one))
    assert refused.status_code == 422
    wait_until(lambda: left(other) < 0.75 * QUOTA, 8)


def test_the_dashboard_opens(service: Replicated) -> None:
    browser = pytest.importorskip("tests.api.dashboard.browser")
    if not browser.CHROMIUM:
        pytest.skip("there is no Chromium")
    url = str(service.client.base_url).rstrip("/")
    with browser.chromium() as chromium, browser.tab(chromium, f"{url}/dashboard") as (page, log):
        page.get_by_role("status").get_by_text("tiny").wait_for()
        page.get_by_label("Question").fill("Who built the harbour of Tarn?")
        page.get_by_role("button", name="Ask", exact=True).click()
        page.get_by_text("Ada Brook").first.wait_for()
        assert not log.faults


def test_ray_sends_no_telemetry_and_shows_no_dashboard(service: Replicated) -> None:
    for pid in descendants(service.process.pid):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"RAY_USAGE_STATS_ENABLED=0" in variables or not variables[0]
    with pytest.raises(httpx.HTTPError):
        httpx.get("http://127.0.0.1:8265/", timeout=5).raise_for_status()


def test_a_killed_replica_costs_only_errors_that_can_be_retried(service: Replicated) -> None:
    before = service.replicas
    with Load(service) as load:
        wait_until(lambda: load.kinds["answered"] >= 8, 60)
        os.kill(replica_processes(service)[0], signal.SIGKILL)
        killed = time.monotonic()
        back = wait_until(lambda: len(service.replicas) == 2 and service.replicas != before, BACK_SECONDS)
        wait_until(lambda: sum(when > killed + back for when, _ in load.outcomes) >= 8, 60)
    print(f"a replica was back after {back:.1f} s; {dict(load.kinds)}")
    assert set(load.kinds) <= {"answered", "503 replica_lost"}
    assert load.kinds["503 replica_lost"] <= load.clients * 3


def test_replicas_are_replaced_without_losing_a_request(service: Replicated) -> None:
    before = set(service.replicas)
    with Load(service, clients=2) as load:
        service.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the replicas are replaced" in service.told.read_text(), 120)
    assert before.isdisjoint(service.replicas)
    assert set(load.kinds) == {"answered"}


def test_a_signal_ends_the_requests_in_flight_and_then_everything(service: Replicated) -> None:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(service.ask(max_tokens=64))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: service.counts("ragkv_questions_running").total() > 0, 20)
    pids = descendants(service.process.pid)
    service.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert service.process.wait(40) == 0
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    wait_until(lambda: not running(pids), 10)


def test_the_log_has_a_line_of_each_request_and_no_path(service: Replicated) -> None:
    told = service.told.read_text()
    assert "/v1/answers" in told
    assert "/v1/documents/{document_id}" in told
    assert "/v1/documents/mill" not in told
    assert json.dumps(QUESTION["question"]) not in told
