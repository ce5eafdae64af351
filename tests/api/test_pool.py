"""A service whose pool of KV blocks is a quarter of what its requests need answers each as it answers it alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragkv.engine.engine import Engine
from ragkv.model.execution.pooled_decode import PooledDecoder
from tests.api.conftest import Service, serving, settings

CLIENTS = 4
PLACES = ("Tarn", "Mell", "Ostrey", "Lindmouth")
WORKS = ("harbour", "bridge", "lighthouse", "chapel", "mill")
DECODE = "psa:least=2,part=0.1,threshold=0.8"
LONGEST = 12
POOL = 2**21
"""Bytes: 256 blocks of one kv head, half of what one of the contexts has."""


def documents() -> list[dict[str, str]]:
    """One document a place, some two hundred tokens each."""
    found = []
    for i, place in enumerate(PLACES):
        lines = [
            f"The {work} of {place} was built in {1700 + 31 * i + 7 * at} by builder number {10 * i + at}."
            for at, work in enumerate(WORKS * 2)
        ]
        found.append({"id": place, "title": place, "text": "\n\n".join(lines)})
    return found


def question(i: int) -> str:
    return f"Who built the {WORKS[i]} of {PLACES[i]}?"


def ask(service: Service, i: int) -> dict[str, Any]:
    body = {"question": question(i), "decode": DECODE, "method": "reuse", "max_tokens": LONGEST, "top_k": 3}
    response = service.post("/v1/answers", body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def samples(service: Service) -> dict[tuple[str, ...], float]:
    """The samples of the pool, by name and label values."""
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    found = (sample for family in families for sample in family.samples)
    return {(each.name, *each.labels.values()): each.value for each in found if each.name.startswith("ragkv_pool")}


def disable_stops(engine: Engine) -> None:
    """Let answers end at their longest only."""
    engine.model.stop_ids = frozenset()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a pool and a document a client."""
    with serving(settings(tmp_path_factory.mktemp("pool"), pool_bytes=POOL)) as running:
        running.post("/v1/documents?wait=true", {"documents": documents()})
        running.engine_thread.submit(disable_stops).result(30)
        yield running


def alone(service: Service) -> list[dict[str, Any]]:
    """Ask one after another, with every context where the model computes."""

    def swap(pooled: PooledDecoder | None) -> PooledDecoder | None:
        def change(engine: Engine) -> PooledDecoder | None:
            before, engine.pooled_decoder = engine.pooled_decoder, pooled
            return before

        return service.engine_thread.submit(change).result(30)

    pooled = swap(None)
    found = [ask(service, i) for i in range(CLIENTS)]
    swap(pooled)
    return found


def test_clients_that_ask_at_once_get_the_answers_that_they_get_alone(service: Service) -> None:
    expected = alone(service)
    token = service.engine_thread.submit(lambda engine: engine.model.token_bytes).result(30)
    assert token * sum(each["report"]["decoding"]["present"] for each in expected) >= 4 * POOL
    assert all(each["report"]["decoding"]["pool"] is None for each in expected)
    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(lambda i: ask(service, i), range(CLIENTS)))
    for one, other in zip(found, expected, strict=True):
        assert one["answer"] == other["answer"]
        one, other = one["report"]["decoding"], other["report"]["decoding"]
        assert one["read"] == other["read"] < other["present"]
        assert one["steps"] == other["steps"] == LONGEST - 1
    check_metrics(service, [each["report"]["decoding"]["pool"] for each in found])


def check_metrics(service: Service, pools: list[dict[str, Any]]) -> None:
    """Compare the metrics with the sums of the reports; the engine is examined when it is idle."""
    deadline, hits = time.monotonic() + 30, sum(each["hits"] for each in pools)
    while (counted := samples(service)).get(("ragkv_pool_reads_total", "hit"), -1) < hits:
        assert time.monotonic() < deadline, counted
        time.sleep(0.2)
    assert counted["ragkv_pool_slots", "free"] == POOL // counted["ragkv_pool_slot_bytes",]
    assert counted["ragkv_pool_slots", "used"] == 0
    assert counted["ragkv_pool_reads_total", "hit"] == hits > 0
    assert counted["ragkv_pool_reads_total", "miss"] == sum(each["read"] - each["hits"] for each in pools) > 0
    assert counted["ragkv_pool_loaded_total",] == sum(each["loaded"] for each in pools)
    assert counted["ragkv_pool_evicted_total",] > 0
