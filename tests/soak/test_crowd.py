"""Many ask for a minute: nobody fails, those who find no place are told when to come back, all others are in time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import BRIDGE, HARBOUR
from tests.api.runtime.test_queueing import generate_load
from tests.soak.test_concurrency import service

ASKERS = 64
SECONDS = 60.0
DEADLINE = 60.0
TURNS = 4
TURN_SECONDS = 6.0


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_sixty_four_askers_are_answered_in_time_or_told_when_to_come_back(tmp_path: Path) -> None:
    with service(tmp_path) as (process, url), httpx.Client(base_url=url, timeout=120) as client:
        filled = client.post("/v1/documents?wait=true", json={"documents": [HARBOUR, BRIDGE]}).json()
        assert filled["status"] == "completed"
        told = generate_load(url, ASKERS, SECONDS)
        took = sorted(told.took)
        figures = [took[int(len(took) * share)] for share in (0.5, 0.9, 0.99)] if took else []
        print(f"\n{len(took)} answers, seconds p50 p90 p99: {figures}, refused {len(told.refused)}")  # seen with -s
        assert not told.faults, told.faults[:3]
        assert len(took) >= ASKERS
        assert figures[-1] < DEADLINE
        assert told.refused, "there are more askers than places, so some had none"
        queue = client.get("/readyz").json()["queue"]
        assert (queue["waiting"], queue["running"], queue["expired"]) == (0, 0, 0)
        assert queue["refused"] == len(told.refused)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_thirty_two_askers_get_twice_the_answers_of_one_in_time(tmp_path: Path) -> None:
    """One asker and 32 take turns, so that other work on the machine meets both."""
    with service(tmp_path) as (process, url), httpx.Client(base_url=url, timeout=120) as client:
        client.post("/v1/documents?wait=true", json={"documents": [HARBOUR, BRIDGE]})
        generate_load(url, 2, 2.0)
        rates: dict[int, list[float]] = {1: [], 32: []}
        took: list[float] = []
        for _ in range(TURNS):
            for askers, found in rates.items():
                began = time.monotonic()
                told = generate_load(url, askers, TURN_SECONDS)
                found.append(len(told.took) / (time.monotonic() - began))
                took += told.took
                assert not told.faults + told.refused, told
        print(f"\nanswers a second: {rates}, longest {max(took):.1f} s")  # seen with -s
        assert sum(rates[32]) >= 2 * sum(rates[1]), rates
        assert sorted(took)[int(len(took) * 0.99)] < DEADLINE
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
