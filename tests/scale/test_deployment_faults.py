"""A whole deployment under load: two replicas, PostgreSQL and a Redis Cluster, of which one after another fails."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ragkv.client import Client
from ragkv.locality import HEADER
from tests.postgres_server import PostgresServer, postgres_server
from tests.redis_cluster import RedisCluster, redis_cluster
from tests.scale.replicated import Replicated, replica_processes, replicated
from tests.scale.services import DOCUMENTS

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.scale, pytest.mark.timeout(600)]

CLIENTS = 20
FOUND_SECONDS = 2.0
"""Longest time until a document of one replica is answered by the other."""
RECOVERY_SECONDS = 10.0
"""Longest time after a fault in which a request may be refused."""
STALLED_SECONDS = 60.0
"""Longest time in which no job ends while some wait: twice that of a dead process's lease."""
QUESTIONS = tuple(f"Who keeps the lamp {number} of Tarn?" for number in range(len(DOCUMENTS)))


@dataclass(frozen=True)
class Deployment:
    """Everything that runs."""

    service: Replicated
    postgres: PostgresServer
    redis: RedisCluster


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two replicas over PostgreSQL and three nodes of Redis."""
    with ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        nodes = stack.enter_context(redis_cluster())
        folder = tmp_path_factory.mktemp("deployment")
        shared = {"RAGKV_CATALOG": postgres.database(), "RAGKV_STORE": nodes.url}
        service = stack.enter_context(replicated(folder, **shared))
        sent = service.client.post("/v1/documents?wait=true", json={"documents": DOCUMENTS})
        assert sent.json()["status"] == "completed", sent.text
        yield Deployment(service, postgres, nodes)


def test_a_document_of_one_replica_is_found_by_the_other_within_seconds(deployment: Deployment) -> None:
    service, waits = deployment.service, []
    for number, (one, other) in enumerate(itertools.permutations(service.replicas * 2, 2)):
        if one == other:
            continue
        body = {"text": f"The mill {number} of Orrin was bought in 1902 by Kit Marlow.", "title": f"Mill {number}"}
        sent = service.client.put(f"/v1/documents/mill-{number}?wait=true", json=body, headers=service.key(one))
        assert sent.status_code == 200, sent.text
        started = time.monotonic()
        while True:
            answer = service.ask(service.key(other), question=f"Who bought the mill {number} of Orrin?").json()
            if f"mill-{number}" in {each["document_id"] for each in answer["citations"]}:
                break
            assert time.monotonic() - started < 30
        waits.append(time.monotonic() - started)
        assert answer["report"]["cache"]["misses"] == 0
    print("seconds until the other replica answered:", " ".join(f"{each:.2f}" for each in waits))
    assert min(waits) < FOUND_SECONDS


@dataclass
class Clients:
    """Clients that ask without a pause, and one that sends documents.

    Attributes:
        url: The service.
        expected: The answer to each question.
        outcomes: When each request ended, and how: `answered`, `wrong: …`, a status with its code, or an exception.
        sent: Ids of the documents that the service accepted, with their jobs.
    """

    url: str
    expected: dict[str, str]
    outcomes: list[tuple[float, str]] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)

    def run(self, seconds: float) -> list[threading.Thread]:
        """Start the clients. They end by themselves."""
        until = time.monotonic() + seconds
        work = [threading.Thread(target=self._ask, args=(number, until)) for number in range(CLIENTS)]
        work.append(threading.Thread(target=self._send, args=(until,)))
        for thread in work:
            thread.start()
        return work

    def _ask(self, number: int, until: float) -> None:
        with httpx.Client(base_url=self.url, timeout=60, headers={HEADER: f"d-{number}"}) as client:
            for question in itertools.cycle(QUESTIONS[number % 3 :] + QUESTIONS[: number % 3]):
                if time.monotonic() > until:
                    return
                body = {"question": question, "method": "scout", "max_tokens": 8}
                response = self._try(client, "POST", "/v1/answers", body)
                if response is not None:
                    answer = response.json()["answer"]
                    right = answer == self.expected[question]
                    self._record("answered" if right else f"wrong: {question} {answer}")

    def _send(self, until: float) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for number in itertools.count():
                if time.monotonic() > until:
                    return
                text = f"The barn {number} of Elm was built in {1800 + number} by Ned Hale."
                body = {"documents": [{"id": f"barn-{number}", "title": f"Barn {number}", "text": text}]}
                response = self._try(client, "POST", "/v1/documents?collection=barns", body)
                if response is not None:
                    self.sent[f"barn-{number}"] = response.json()["job_id"]
                    self._record("accepted")
                time.sleep(0.5)

    def _try(self, client: httpx.Client, method: str, path: str, body: object) -> httpx.Response | None:
        """Send a request. What did not succeed is recorded; after a 503 the client waits as long as it is told."""
        try:
            response = client.request(method, path, json=body)
        except httpx.HTTPError as error:
            self._record(type(error).__name__)
            return None
        if response.is_success:
            return response
        self._record(f"{response.status_code} {response.json().get('code')}")
        if response.status_code in (429, 503):
            time.sleep(min(2.0, float(response.headers["retry-after"])))
        return None

    def _record(self, outcome: str) -> None:
        self.outcomes.append((time.monotonic(), outcome))


def test_faults_under_load_cost_only_errors_that_can_be_retried(deployment: Deployment) -> None:
    service, faults = deployment.service, dict[str, float]()
    expected = {question: service.ask(question=question).json()["answer"] for question in QUESTIONS}
    clients = Clients(str(service.client.base_url), expected)
    work = clients.run(60.0)

    time.sleep(8)
    os.kill(replica_processes(service)[0], signal.SIGKILL)
    faults["a replica is killed"] = time.monotonic()
    time.sleep(17)
    deployment.redis.nodes[1].process.kill()
    faults["Redis loses a node"] = time.monotonic()
    time.sleep(15)
    faults["PostgreSQL restarts"] = time.monotonic()
    deployment.postgres.stop(signal.SIGQUIT)
    time.sleep(1)
    deployment.postgres.start()
    for thread in work:
        thread.join()

    kinds = Counter(outcome for _, outcome in clients.outcomes)
    print(dict(kinds))
    refused = [(when, outcome) for when, outcome in clients.outcomes if outcome not in ("answered", "accepted")]
    starts = [*faults.values(), float("inf")]
    for (fault, start), end in zip(faults.items(), starts[1:], strict=True):
        late = [when - start for when, _ in refused if start <= when < end]
        print(f"{fault}: {len(late)} requests refused, the last after {max(late, default=0.0):.1f} s")
        assert max(late, default=0.0) < RECOVERY_SECONDS, fault
    assert {outcome.split()[0] for _, outcome in refused} <= {"503"}, kinds
    _check_documents(service, clients.sent)


def _unfinished(service: Replicated, sent: dict[str, str]) -> list[dict[str, Any]]:
    """Return the jobs that wait or run. None may have failed."""
    jobs = [service.client.get(f"/v1/jobs/{job}").json() for job in sent.values()]
    assert not [job for job in jobs if job["status"] == "failed"], "a fault that passes is no fault of a document"
    return [job for job in jobs if job["status"] != "completed"]


def _check_documents(service: Replicated, sent: dict[str, str]) -> None:
    """Every document that was accepted is there once, and its job is done."""
    began = fewer = time.monotonic()
    left = _unfinished(service, sent)
    while left:  # how fast jobs end is the machine's affair; that they go on is not
        time.sleep(0.5)
        before, left = left, _unfinished(service, sent)
        fewer = time.monotonic() if len(left) < len(before) else fewer
        assert time.monotonic() - fewer < STALLED_SECONDS, left
    print(f"all {len(sent)} documents were stored {time.monotonic() - began:.0f} s after the last was sent")
    with Client(str(service.client.base_url)) as client:
        assert Counter(each.id for each in client.documents("barns")) == Counter(list(sent))
    last = next(reversed(sent))
    answer = service.ask(question=f"Who built the {last.replace('-', ' ')} of Elm?", collection="barns").json()
    assert last in {each["document_id"] for each in answer["citations"]}
