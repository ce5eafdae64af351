"""Jobs over HTTP: progress, estimated time, events and cancelling."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ragkv.api.runtime import catalog_service
from tests.api.conftest import Service
from tests.api.test_bad_input import check_problem
from tests.api.test_faults import held, tale

SEVERAL_GROUPS = 10, 80
"""Documents and their sentences: too long to be encoded all at once, each group longer than events are apart."""


def send(service: Service, collection: str, count: int = 3, sentences: int = 1, **more: Any) -> str:
    """Queue documents and return the id of the job."""
    texts = [f"Boat {n} of Tarn. " * sentences for n in range(count)]
    documents = [{"id": f"d{n}", "text": text, "collection": collection, **more} for n, text in enumerate(texts)]
    job_id: str = service.post("/v1/documents", {"documents": documents}).json()["job_id"]
    return job_id


def get(service: Service, job_id: str, **more: Any) -> Any:
    return service.client.get(f"/v1/jobs/{job_id}", params=more).json()


def events(service: Service, job_id: str) -> Iterator[tuple[str, Any]]:
    """Yield (event, data) until the stream ends."""
    with service.client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
        name = ""
        for line in stream.iter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)


def test_a_job_counts_its_documents_and_names_those_that_failed(service: Service) -> None:
    good = [{"id": f"good{n}", "text": f"Boat {n}."} for n in range(3)]
    bad = [{"id": f"bad{n}", "text": " "} for n in range(25)]
    given = [{**each, "collection": "counted"} for each in [*good, *bad]]
    job = service.post("/v1/documents?wait=true", {"documents": given}).json()
    assert job["counts"] == {"total": 28, "done": 28, "completed": 3, "unchanged": 0, "failed": 25, "cancelled": 0}
    assert (job["status"], job["error"], job["last_error"]["code"]) == ("completed", None, "invalid_document")
    assert "bad24" in job["last_error"]["message"]
    assert [document["id"] for document in job["documents"]] == [f"bad{n}" for n in range(20)]
    assert get(service, job["id"]) == get(service, job["id"], documents="failed") == job
    whole = get(service, job["id"], documents="all")
    assert [document["id"] for document in whole["documents"]] == [each["id"] for each in given]
    assert check_problem(service.client.get(f"/v1/jobs/{job['id']}?documents=some"), 422)
    again = service.post("/v1/documents?wait=true", {"documents": given}).json()
    assert (again["counts"]["unchanged"], again["counts"]["completed"], again["status"]) == (3, 0, "completed")


def test_the_estimated_time_is_unknown_at_first_and_then_falls(service: Service) -> None:
    with held(service):
        job_id = send(service, "timed", *SEVERAL_GROUPS)
        assert get(service, job_id)["eta_seconds"] is None
    seen = [data for _, data in events(service, job_id)]
    estimates = [(job["counts"]["done"], job["eta_seconds"]) for job in seen if job["eta_seconds"] is not None]
    took = seen[-1]["finished"] - seen[-1]["started"]
    assert len(estimates) >= 2
    assert all(done > 0 for done, _ in estimates), "the estimate needs one document that is done"
    assert all(0 <= eta < 5 * took for _, eta in estimates)
    assert estimates[-1][1] < estimates[0][1]
    assert seen[-1]["eta_seconds"] is None


def test_the_remaining_time_of_a_long_document_is_estimated(service: Service) -> None:
    job_id = service.post("/v1/documents", {**tale("Lamp", "Ada", 20), "collection": "timed"}).json()["job_id"]
    estimates = [
        (data["done"], data["eta_seconds"])
        for _, data in events(service, job_id)
        if data["stage"] == "encode" and data["eta_seconds"] is not None
    ]
    assert estimates
    assert all(done > 0 for done, _ in estimates)


def test_job_events_report_every_change_and_end_with_the_job(service: Service) -> None:
    job_id = send(service, "followed", *SEVERAL_GROUPS)
    received = list(events(service, job_id))
    assert [name for name, _ in received[:-1]] == ["progress"] * (len(received) - 1)
    assert received[-1] == ("done", get(service, job_id))
    assert [one for one, other in itertools.pairwise(received) if one == other] == []
    counts = [data["counts"]["done"] for _, data in received]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert list(events(service, job_id)) == received[-1:], "a client that comes back or is late gets the end"


def test_a_disconnected_watcher_no_longer_polls_the_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_service, "WATCHERS", 2)
    with held(service):
        job_id = send(service, "left")
        polls: list[str] = []
        get_job = service.engine_thread.jobs.get

        def counted(*arguments: Any) -> Any:
            polls.append(arguments[0])
            return get_job(*arguments)

        monkeypatch.setattr(service.engine_thread.jobs, "get", counted)
        path = f"/v1/jobs/{job_id}/events"
        with service.client.stream("GET", path) as one, service.client.stream("GET", path) as two:
            lines = [one.iter_lines(), two.iter_lines()]
            assert [next(each) for each in lines] == ["event: progress"] * 2
            refused = service.client.get(path)
            assert check_problem(refused, 429)["code"] == "busy"
            assert int(refused.headers["retry-after"]) > 0
        until = time.monotonic() + 10
        while service.engine_thread.catalog_service.watchers and time.monotonic() < until:
            time.sleep(0.02)
        assert service.engine_thread.catalog_service.watchers == 0
        before = len(polls)
        time.sleep(0.6)
        assert len(polls) == before
    assert service.job(job_id)["status"] == "completed"


def test_the_latest_jobs_come_first_and_can_be_filtered_by_status(service: Service) -> None:
    refused = service.post("/v1/documents?wait=true", {"id": "x", "text": " ", "collection": "recent"})
    failed = service.job(check_problem(refused, 422)["job_id"])
    with held(service):
        waiting = [send(service, "recent", 1, title=str(n)) for n in range(3)]
        listed = service.client.get("/v1/jobs?limit=4").json()["jobs"]
        assert [job["id"] for job in listed] == [*waiting[::-1], failed["id"]]
        assert listed[-1] == failed
        queued = service.client.get("/v1/jobs?status=queued&limit=100").json()["jobs"]
        assert [job["id"] for job in queued if job["collection"] == "recent"] == waiting[::-1]
    assert all(service.job(job_id)["status"] == "completed" for job_id in waiting)
    for query in ("limit=0", "limit=101", "status=done"):
        check_problem(service.client.get(f"/v1/jobs?{query}"), 422)


def test_cancelling_a_job_is_idempotent(service: Service) -> None:
    with held(service):
        job_id = send(service, "cancelled")
        first, second = (service.client.post(f"/v1/jobs/{job_id}/cancel") for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert first.json() == second.json() == get(service, job_id)
    assert (first.json()["status"], first.json()["counts"]["cancelled"]) == ("cancelled", 3)
    assert service.client.get("/v1/documents?collection=cancelled").json()["documents"] == []
    done = service.job(send(service, "cancelled"))
    assert service.client.post(f"/v1/jobs/{done['id']}/cancel").json()["status"] == "completed"


def test_an_unknown_job_is_not_found(service: Service) -> None:
    calls: list[tuple[str, str]] = [("GET", ""), ("GET", "/events"), ("POST", "/cancel")]
    for method, rest in calls:
        check_problem(service.client.request(method, f"/v1/jobs/none{rest}"), 404)


def test_many_clients_may_poll_during_ingest(service: Service) -> None:
    job_id = send(service, "looked", 15)
    faults: list[str] = []

    def poll() -> None:
        with httpx.Client(base_url=service.url, timeout=30) as client:
            while (job := client.get(f"/v1/jobs/{job_id}").json())["finished"] is None:
                if job["counts"]["done"] > job["counts"]["total"]:
                    faults.append(str(job))

    threads = [threading.Thread(target=poll) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert get(service, job_id)["counts"]["completed"] == 15
