"""The file of the catalogue is overwritten while a real service uses it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import httpx
import pytest

from tests.program import served

PAGE = 4096


def overwrite(path: Path, chance: random.Random) -> None:
    """Write noise over the pages of a file, one after another, in any order."""
    pages = list(range(0, path.stat().st_size, PAGE))
    chance.shuffle(pages)
    with path.open("r+b") as file:
        for at in pages:
            os.pwrite(file.fileno(), chance.randbytes(PAGE), at)


@pytest.mark.timeout(600)
def test_a_catalogue_that_is_overwritten_ends_in_503_for_every_request_and_in_health_that_tells(tmp_path: Path) -> None:
    def send(client: httpx.Client) -> list[httpx.Response]:
        """Send requests of every kind that needs the catalogue; none may hang."""
        return [
            client.put("/v1/documents/mell?wait=true", json={"text": "The bridge of Mell is blue."}, timeout=30),
            client.post("/v1/documents?wait=true", json={"id": "oban", "text": "Oban has a lamp."}, timeout=30),
            client.post("/v1/answers", json={"question": "Who built the harbour?"}, timeout=30),
            client.post("/v1/search", json={"query": "harbour"}, timeout=30),
            client.get("/v1/documents", timeout=30),
            client.get("/v1/jobs", timeout=30),
            client.delete("/v1/documents/tarn", timeout=30),
        ]

    with served(tmp_path) as (_, client):
        text = "The harbour of Tarn was built in 1889 by Ada Brook."
        assert client.put("/v1/documents/tarn?wait=true", json={"text": text}).status_code == 200
        chance = random.Random(10)
        for name in ("catalog.sqlite-wal", "catalog.sqlite"):
            overwrite(tmp_path / "data" / name, chance)
        first = send(client)
        refused = [response for response in first if response.status_code == 503]
        assert len(refused) >= 6, [response.status_code for response in first]
        for response in [*refused, *send(client)]:
            assert (response.status_code, response.json()["code"]) == (503, "catalogue_damaged")
        health, ready = client.get("/healthz"), client.get("/readyz")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "damaged" in health.json()["reason"]
        assert (ready.status_code, ready.json()["checks"]["catalogue"]["status"]) == (503, "failed")
        assert not [each for each in (health, ready, *refused) if str(tmp_path) in each.text or ".sqlite" in each.text]
    critical = [line for line in (tmp_path / "log").read_text().splitlines() if "critical ragkv.catalog" in line]
    assert len(critical) == 1
    assert "restore a backup" in critical[0]
