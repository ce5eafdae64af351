"""A real service on a real disk that is full: of its own KV, and of the files of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.program import served
from tests.small_disk import Ballast, disk_of, mounts_disks, on_a_small_disk

DISK = 8 * 2**20
PATIENCE = 30.0
"""Seconds; a request that waits for room that nobody makes is not answered at all."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not mounts_disks(), reason="this machine does not let a user mount a small disk"),
]


def put(client: httpx.Client, name: str) -> httpx.Response:
    text = f"The harbour of {name} was built by Ada Brook, and its lamp is kept by Otto Lindqvist."
    return client.put(f"/v1/documents/{name}?wait=true", json={"text": text}, timeout=PATIENCE)


def entries(disk: Path) -> set[str]:
    return {path.name for path in disk.glob("kv/??/*.kv")}


def names(client: httpx.Client) -> list[str]:
    return [document["id"] for document in client.get("/v1/documents").json()["documents"]]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with the data of a service that was stopped."""
    with served(tmp_path) as (_, client):
        for name in ("tarn", "mell", "oban", "bute"):
            assert put(client, name).status_code == 200
    return tmp_path


def test_kv_gives_way_to_a_start_to_removals_and_to_documents_on_a_full_disk(stored: Path) -> None:
    with served(stored, on_a_small_disk(DISK, full=True)) as (process, client):
        disk = disk_of(process.pid, stored)
        assert len(entries(disk)) < 4, "the start has made room"
        assert names(client) == ["bute", "mell", "oban", "tarn"], "and has lost nothing"
        Ballast(disk).fill()
        assert client.delete("/v1/documents/tarn", timeout=PATIENCE).status_code == 204
        assert put(client, "skye").status_code == 200
        assert names(client) == ["bute", "mell", "oban", "skye"]
        asked = client.post("/v1/answers", json={"question": "Who built the harbour of mell?"})
        assert asked.json()["answer"] == "Ada Brook", "KV that is gone costs time only"


def test_where_nothing_can_give_way_a_request_is_refused_in_time_and_room_is_enough_to_go_on(tmp_path: Path) -> None:
    with served(tmp_path, on_a_small_disk(DISK)) as (process, client):
        disk = disk_of(process.pid, tmp_path)
        ballast = Ballast(disk)
        assert put(client, "tarn").status_code == 200
        for leaving in (500_000, 200_000, 64_000, 0):
            for path in disk.glob("kv/??/*.kv"):
                path.unlink()
            ballast.fill(leaving)
            answer = put(client, f"left-{leaving}")
            assert answer.status_code in (200, 507), answer.text
        assert answer.status_code == 507
        assert answer.json()["code"] == "no_space"
        assert str(tmp_path) not in answer.text
        ballast.drop()
        assert put(client, "mell").status_code == 200, "without a restart"
        checks: dict[str, Any] = client.get("/readyz").json()["checks"]
        assert checks["engine"]["status"] == checks["catalogue"]["status"] == "ok"
