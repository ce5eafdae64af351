"""Twice as many ask as may wait, for a minute: nobody fails, some are sent away for a while, all others are in time."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import BRIDGE, HARBOUR
from tests.api.runtime.test_queueing import generate_load
from tests.soak.test_concurrency import service

ASKERS = 64
SECONDS = 60.0
DEADLINE = 60.0


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
