"""One job of many documents in a real process, which is killed in the middle and restarted."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.api.app import DRAIN_SECONDS
from ragkv.catalog import Catalog
from ragkv.ingest.jobs import Jobs
from tests.program import served

WORDS = ("gull", "mast", "quay", "rope", "tide", "bell", "fog", "crew", "lamp", "wall", "ship", "net")


def document(number: int, size: int) -> dict[str, Any]:
    """Build a document of about `size` characters that differs for each number."""
    sentences = [f"Boat {number} of Tarn sails at {number % 24} o'clock."]
    while sum(map(len, sentences)) < size:
        place = number * 31 + len(sentences) * 7
        sentences.append(f"The {WORDS[place % 12]} of {number} lies by the {WORDS[place // 12 % 12]} {len(sentences)}.")
    return {"id": f"boat/{number:04}", "text": " ".join(sentences), "metadata": {"hour": number % 24}}


def progress(client: httpx.Client, job_id: str, until: int) -> list[dict[str, Any]]:
    """Return the events of the job until so many documents are done."""
    jobs = []
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                jobs.append(json.loads(line.removeprefix("data: ")))
                if jobs[-1]["counts"]["done"] >= until or jobs[-1]["finished"]:
                    break
    return jobs


def whole(client: httpx.Client) -> dict[str, float]:
    """Return (id, time of ingest) of all documents in order."""
    found, after = {}, ""
    while after is not None:
        page = client.get("/v1/documents", params={"limit": 100, "after": after}).json()
        found |= {each["id"]: each["updated"] for each in page["documents"]}
        after = page["after"]
    return found


def check_restart(folder: Path, count: int, size: int) -> None:
    """Send documents, kill the service when a third is ingested, restart it, send them again, and stop it."""
    documents = [document(number, size) for number in range(count)]
    body = json.dumps({"documents": documents}).encode()
    head = {"content-type": "application/json"}
    with served(folder) as (process, client):
        sent = client.post("/v1/documents", content=body, headers=head)
        assert sent.status_code == 202, sent.text
        job_id = sent.json()["job_id"]
        jobs = progress(client, job_id, count // 3)
        counts = [job["counts"]["done"] for job in jobs]
        assert counts == sorted(counts)
        assert len(set(counts)) > 2, "it is seen to go on"
        assert [job["documents"] for job in jobs] == [[]] * len(jobs)
        assert jobs[-1]["eta_seconds"] > 0
        process.send_signal(signal.SIGKILL)
        process.wait()
    catalog = Catalog.open(folder / "data" / "catalog.sqlite")
    found = Jobs(catalog, 1).get(job_id, "failed")
    assert (found.finished, count // 3 <= found.counts.done < count) == (None, True), "it was killed in the middle"
    read = {info.id: info.updated for info in catalog.documents()}
    catalog.close()
    with served(folder) as (process, client):
        last = progress(client, job_id, count)[-1]
        while last["finished"] is None:
            last = client.get(f"/v1/jobs/{job_id}").json()
        # The document in work at the kill may have been stored before its job was told: it is found unchanged then.
        counts = last["counts"]
        assert (last["status"], counts["completed"] + counts["unchanged"]) == ("completed", count)
        assert counts["unchanged"] <= 1
        there = whole(client)
        assert list(there) == [each["id"] for each in documents]
        assert there == there | read, "what was read before is not read again"
        assert client.get("/v1/collections").json()["collections"][0]["documents"] == count
        again = client.post("/v1/documents?wait=true", content=body, headers=head, timeout=600).json()
        assert (again["id"] != job_id, again["counts"]["unchanged"], again["counts"]["done"]) == (True, count, count)
        asked = {"question": "When does the boat sail?", "filter": {"hour": 7}, "max_tokens": 1}
        answer = client.post("/v1/answers", json=asked).json()
        assert {int(each["document_id"][-4:]) % 24 for each in answer["citations"]} == {7}
        assert answer["report"]["ratios"]["cache_hit"] == 1.0
        blank = client.post("/v1/documents?wait=true", files={"files": ("blank.txt", b"\n" * 5 * 2**20)}).json()
        assert blank["detail"] == "document 'blank.txt' is empty", "a file may be larger than a part of a form"
        stopped(process, client)


def stopped(process: Any, client: httpx.Client) -> None:
    """Send SIGTERM while a client follows a job: the stream and the service end."""
    long = {"text": document(1, 200_000)["text"]}
    job_id = client.put("/v1/documents/long", json=long).json()["job_id"]
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: progress"
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert "event: done" not in list(lines)
        assert time.monotonic() - began < DRAIN_SECONDS / 2
    assert process.wait(20) == 0


@pytest.mark.timeout(600)
def test_a_job_of_many_documents_survives_a_kill_and_is_done_once(tmp_path: Path) -> None:
    check_restart(tmp_path, 24, 800)  # five documents are encoded together, so it takes five groups


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_job_of_a_thousand_small_documents_survives_a_kill(tmp_path: Path) -> None:
    check_restart(tmp_path, 1000, 2048)
