"""How a service ends, by SIGTERM or killed, and how the next one goes on."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.api.app import DRAIN_SECONDS
from ragkv.config import bundled_models
from tests.api.streams import events_of
from tests.libraries import ANSWER, QUESTION
from tests.program import LIGHT, served


@pytest.mark.timeout(600)
def test_a_killed_service_starts_again_with_the_same_answer_and_all_hits(tmp_path):
    question = {"question": QUESTION}
    with served(tmp_path) as (_, client):
        documents = [{"id": path.stem, "text": path.read_text(), "title": path.stem} for path in LIGHT]
        job = client.post("/v1/documents?wait=true", json={"documents": documents}).json()
        assert job["status"] == "completed"
        first = client.post("/v1/answers", json=question).json()
    with served(tmp_path) as (_, client):  # the first one was killed, not stopped
        second = client.post("/v1/answers", json=question).json()
    assert second["answer"] == first["answer"] == ANSWER
    cache = second["report"]["cache"]
    # Of some chunks all that was needed was in memory by then: it is fetched while the question is being embedded.
    assert cache["hits"]["store"] + cache["hits"]["host"] == cache["chunks"] > 2
    assert cache["fallbacks"] == []
    assert second["report"]["chunks"] == first["report"]["chunks"]


def job_of(client: httpx.Client, job_id: str, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The job, as soon as it is as wanted."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(f"/v1/jobs/{job_id}").json()
        if until(job):
            return job
        time.sleep(0.02)
    raise TimeoutError(job)


@pytest.mark.timeout(600)
def test_a_service_stopped_while_it_reads_ends_in_time_and_reads_on_at_its_next_start(tmp_path):
    text = "\n\n".join(f"In chapter {n} the keeper counted {n} ships before the fog came down." for n in range(200))
    (tmp_path / "data" / "qualified").mkdir(parents=True)  # without a record: the first start tests the model
    with served(tmp_path) as (process, client):
        assert client.get("/healthz").json()["reuse"] == "on"
        job_id = client.post("/v1/documents", json={"id": "tale", "text": text}).json()["job_id"]
        job_of(client, job_id, lambda job: job["stage"] == "encode" and job["done"] >= 1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(DRAIN_SECONDS + 20)
        took = time.monotonic() - began
        assert process.returncode == 0
        assert process.stderr.read() == "stopped\n"
        assert took < DRAIN_SECONDS + 5
    (qualified,) = (tmp_path / "data" / "qualified").iterdir()
    when = qualified.stat().st_mtime_ns
    with served(tmp_path) as (_, client):
        job = job_of(client, job_id, lambda job: job["finished"] is not None)
        assert (job["status"], job["id"]) == ("completed", job_id)
        answer = client.post("/v1/answers", json={"question": "What did the keeper count?", "max_tokens": 2}).json()
        assert {citation["document_id"] for citation in answer["citations"]} == {"tale"}
        assert answer["report"]["ratios"]["cache_hit"] == 1.0
    assert qualified.stat().st_mtime_ns == when, "what was shown at the first start is remembered"


def stream_of(client: httpx.Client, events: list[tuple[str, Any]], started: threading.Event, **body: Any) -> None:
    """Ask with `stream` and note the events, to their end."""
    with client.stream("POST", "/v1/answers", json={"question": QUESTION, "stream": True, **body}) as response:
        for event in events_of(response):
            events.append(event)
            started.set()


def talkative(folder: Path) -> Path:
    """The bundled model, but nothing ends an answer except its longest length."""
    shutil.copytree(bundled_models() / "tiny", folder)
    changes = {
        "profile.json": {"stop": []},
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer_config.json": {"eos_token": "<pad>"},
    }
    for name, change in changes.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **change}))
    return folder


@pytest.mark.timeout(600)
def test_a_service_stopped_while_it_streams_ends_every_stream_in_words(tmp_path):
    settings = {"RAGKV_MODEL": str(talkative(tmp_path / "talkative")), "RAGKV_MAX_TOKENS": "4000"}
    short, long, started = [], [], [threading.Event(), threading.Event()]
    with served(tmp_path, **settings) as (process, client):
        document = {"id": "tarn", "text": "The harbour of Tarn was built in 1889 by Ada Brook."}
        assert client.post("/v1/documents?wait=true", json=document).json()["status"] == "completed"
        threads = [
            threading.Thread(target=stream_of, args=(client, short, started[0]), kwargs={"max_tokens": 5}),
            threading.Thread(target=stream_of, args=(client, long, started[1]), kwargs={"max_tokens": 4000}),
        ]
        for thread in threads:
            thread.start()
        assert all(each.wait(60) for each in started)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        process.wait(DRAIN_SECONDS + 20)
        took = time.monotonic() - began
        assert process.returncode == 0
        assert "Traceback" not in process.stderr.read()
    assert short[-1][0] == "done", short[-1]
    name, problem = long[-1]
    assert (name, problem["code"], problem["status"]) == ("error", "stopping", 503)
    assert took < DRAIN_SECONDS + 3


SOON = """
import sys
from ragkv.api import app
from ragkv.cli import run

app.DRAIN_SECONDS = 3
sys.exit(run(["serve", "--port", "0"]))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_every_stream_ends_in_words_however_often_a_signal_comes(tmp_path, number):
    """Answers and jobs are followed; the signal comes again and again until the process has ended."""
    settings = {"RAGKV_MODEL": str(talkative(tmp_path / "talkative")), "RAGKV_MAX_TOKENS": "4000"}
    text = "\n\n".join(f"In chapter {n} the keeper counted {n} ships before the fog came down." for n in range(400))
    answers, jobs = [[] for _ in range(3)], [[] for _ in range(24)]
    started = [threading.Event() for _ in answers + jobs]
    with served(tmp_path, ["-c", SOON], **settings) as (process, client):
        document = {"id": "tarn", "text": "The harbour of Tarn was built in 1889 by Ada Brook."}
        assert client.post("/v1/documents?wait=true", json=document).json()["status"] == "completed"
        job_id = client.post("/v1/documents", json={"id": "tale", "text": text}).json()["job_id"]

        def listen(events: list[tuple[str, Any]], first: threading.Event) -> None:
            with client.stream("GET", f"/v1/jobs/{job_id}/events") as response:
                for event in events_of(response):
                    events.append(event)
                    first.set()

        threads = [
            threading.Thread(target=stream_of, args=(client, events, first), kwargs={"max_tokens": 4000})
            for events, first in zip(answers, started, strict=False)
        ]
        threads += [
            threading.Thread(target=listen, args=(events, first))
            for events, first in zip(jobs, started[len(answers) :], strict=True)
        ]
        for thread in threads:
            thread.start()
        assert all(first.wait(60) for first in started)
        until = time.monotonic() + 60
        while process.returncode is None and time.monotonic() < until:
            process.send_signal(number)
            time.sleep(0.02)
        assert process.wait(1) == 0
        for thread in threads:
            thread.join(60)
        assert process.stderr.read() == "stopped\n"
    ends = [events[-1] for events in answers + jobs]
    assert {(name, problem["code"], problem["status"]) for name, problem in ends} == {("error", "stopping", 503)}


STUCK = """
import sys, threading, time, torch
from ragkv.api import app
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.cli import run

def compute(engine):
    ends, a = time.monotonic() + 60, torch.ones(400, 400)
    while time.monotonic() < ends:
        a = (a @ a).clamp(0, 1)

class StuckEngineThread(EngineThread):
    def start(self):
        ready = super().start()
        ready.add_done_callback(lambda _: self.submit(compute))
        return ready

app.EngineThread = StuckEngineThread
app.DRAIN_SECONDS = 3
sys.exit(run(["serve", "--port", "0"]))
"""


@pytest.mark.timeout(600)
def test_a_service_whose_engine_does_not_let_go_ends_in_time_all_the_same(tmp_path):
    with served(tmp_path, ["-c", STUCK]) as (process, client):
        assert client.get("/healthz").status_code == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert 3 < time.monotonic() - began < 3 + 5
        assert process.stderr.read() == "stopped\n"
