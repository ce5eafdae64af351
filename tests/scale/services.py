"""Several real services with data folders of their own and one Redis Cluster, as replicas behind a proxy are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.program import SERVE, served
from tests.redis_cluster import RedisCluster

KEEPERS = ("Ada Brook", "Ivo Marsh", "Otto Lind", "Eva Stone", "Max Field", "Ida Wood")
GALES = "That autumn gales came in from the west and the boats stayed in the harbour for many days."
DOCUMENTS = [
    {"id": f"lamp-{n}", "title": f"Lamp {n}", "text": f"The lamp {n} of Tarn is kept by {name}. " + GALES}
    for n, name in enumerate(KEEPERS)
]
"""Six documents of one chunk each, so a question about the lamps reads six chunks."""
SECONDS = 60.0
"""Longest wait for something that should come soon, on a busy machine."""
QUESTION = "Who keeps the lamp 3 of Tarn?"


@dataclass(frozen=True)
class Replicas:
    """Services over one cluster.

    Attributes:
        cluster: The cluster.
        clients: A client of each service.
    """

    cluster: RedisCluster
    clients: tuple[httpx.Client, ...]

    def flush(self) -> None:
        """Empty the nodes that answer."""
        for node in self.cluster.nodes:
            with redis.Redis(port=node.port) as admin:
                admin.flushall()

    def ask(self, replica: int = 0, question: str = QUESTION) -> dict[str, Any]:
        """Ask one service."""
        response = self.clients[replica].post("/v1/answers", json={"question": question, "max_tokens": 4})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def ask_together(self, count: int) -> list[dict[str, Any]]:
        """Ask all services at the same time, `count` questions in turn."""
        answers: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(self.ask(n % len(self.clients)))) for n in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == count
        return answers

    def flights(self) -> Counter[str]:
        """Return the missing chunks of all services since their start, by how they were obtained."""
        counts: Counter[str] = Counter()
        for client in self.clients:
            counts.update({result: int(value) for result, value in _flights(client.get("/metrics").text)})
        return counts

    def flights_when(self, as_expected: Callable[[Counter[str]], bool]) -> Counter[str]:
        """Return the flights when they are as expected. A service counts what it knew at its latest examination."""
        until = time.monotonic() + SECONDS
        while not as_expected(counts := self.flights()):
            assert time.monotonic() < until, counts
            time.sleep(0.2)
        return +counts

    def store_health(self, replica: int = 0) -> str:
        """Return what a service says about its store: `ok`, or what is wrong."""
        check = self.clients[replica].get("/readyz").json()["checks"]["store"]
        return str(check["detail"] or check["status"])


def _flights(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("ragkv_chunk_flights_total{"):
            yield name.split('"')[1], float(value)


@contextmanager
def replicas(
    folder: Path, cluster: RedisCluster, count: int, program: Sequence[str] = SERVE, **settings: str
) -> Iterator[Replicas]:
    """Start services with the same six documents. program: as for `served`."""
    given = {"RAGKV_STORE": cluster.url, "RAGKV_HOST_BYTES": "0", "RAGKV_DASHBOARD": "false", **settings}
    with ExitStack() as stack:
        clients = []
        for number in range(count):
            own = folder / str(number)
            own.mkdir()
            service = served(own, program, new_interpreter=program is not SERVE, **given)
            _, client = stack.enter_context(service)
            clients.append(client)
        for client in clients:
            job = client.post("/v1/documents?wait=true", json={"documents": DOCUMENTS}).json()
            assert job["status"] == "completed", job
        yield Replicas(cluster, tuple(clients))


def hits(answers: Sequence[dict[str, Any]]) -> int:
    """Count the chunks that were found."""
    return sum(sum(answer["report"]["cache"]["hits"].values()) for answer in answers)


def misses(answers: Sequence[dict[str, Any]]) -> int:
    """Count the chunks that were not found."""
    return sum(answer["report"]["cache"]["misses"] for answer in answers)
