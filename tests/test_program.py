"""Whole programs, as a user runs them: killed and started again, fed garbage, with a store that is not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import DRAIN_SECONDS
from ragkv.config import bundled_model
from ragkv.samples import folder
from tests.api.streams import events_of
from tests.libraries import ANSWER, QUESTION
from tests.redis_server import redis_server
from tests.trap import set_trap

SERVE = ("-m", "ragkv.cli", "serve", "--port", "0")
LIGHT = [path for path in sorted(folder().glob("*.md")) if path.name[:2] in ("01", "02")]


def ragkv(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "ragkv.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@contextmanager
def served(
    cwd: Path, program: Sequence[str] = SERVE, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """`ragkv serve` on a free port; killed with SIGKILL at the end. program: another one that does that. What it logs
    comes to the end of the file `log`.

    One thread: two that share a busy core wait for each other far longer than they work.
    """
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, *program]
    surroundings = {**os.environ, "PYTHONPATH": root, "RAGKV_THREADS": "1", **environment}
    with (
        (cwd / "log").open("a") as log,
        subprocess.Popen(command, cwd=cwd, env=surroundings, stdout=log, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            while "serving at" not in (line := process.stderr.readline()):
                assert line, "the service ended before it served"
            with httpx.Client(base_url=line.split()[-1], timeout=100) as client:
                yield process, client
        finally:
            process.kill()


def told_in_words(done: subprocess.CompletedProcess[str]) -> bool:
    """Every fault is a line of its own, and none is a traceback."""
    return "Traceback" not in done.stderr and "ragkv: " in done.stderr


@pytest.mark.timeout(240)
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
    assert second["report"]["cache"]["hits"]["store"] == second["report"]["cache"]["chunks"] > 2
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


@pytest.mark.timeout(240)
def test_a_service_stopped_while_it_reads_ends_in_time_and_reads_on_at_its_next_start(tmp_path):
    text = "\n\n".join(f"In chapter {n} the keeper counted {n} ships before the fog came down." for n in range(200))
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


def stream_of(client: httpx.Client, events: list[tuple[str, Any]], begun: threading.Event, **body: Any) -> None:
    """Ask with `stream` and note the events, to their end."""
    with client.stream("POST", "/v1/answers", json={"question": QUESTION, "stream": True, **body}) as response:
        for event in events_of(response):
            events.append(event)
            begun.set()


def talkative(folder: Path) -> Path:
    """The bundled model, but nothing ends an answer except its longest length."""
    shutil.copytree(bundled_model(), folder)
    changes = {
        "profile.json": {"stop": []},
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer_config.json": {"eos_token": "<pad>"},
    }
    for name, change in changes.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **change}))
    return folder


@pytest.mark.timeout(240)
def test_a_service_stopped_while_it_streams_ends_every_stream_in_words(tmp_path):
    settings = {"RAGKV_MODEL": str(talkative(tmp_path / "talkative")), "RAGKV_MAX_TOKENS": "4000"}
    short, long, begun = [], [], [threading.Event(), threading.Event()]
    with served(tmp_path, **settings) as (process, client):
        document = {"id": "tarn", "text": "The harbour of Tarn was built in 1889 by Ada Brook."}
        assert client.post("/v1/documents?wait=true", json=document).json()["status"] == "completed"
        threads = [
            threading.Thread(target=stream_of, args=(client, short, begun[0]), kwargs={"max_tokens": 5}),
            threading.Thread(target=stream_of, args=(client, long, begun[1]), kwargs={"max_tokens": 4000}),
        ]
        for thread in threads:
            thread.start()
        assert all(each.wait(60) for each in begun)
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


STUCK = """
import sys, threading, time, torch
from api import app, worker
from ragkv.cli import run

def compute(engine):
    ends, a = time.monotonic() + 60, torch.ones(400, 400)
    while time.monotonic() < ends:
        a = (a @ a).clamp(0, 1)

class Stuck(worker.Worker):
    def start(self):
        ready = super().start()
        ready.add_done_callback(lambda _: self.submit(compute))
        return ready

app.Worker = Stuck
sys.exit(run(["serve", "--port", "0"]))
"""


@pytest.mark.timeout(240)
def test_a_service_whose_engine_does_not_let_go_ends_in_time_all_the_same(tmp_path):
    with served(tmp_path, ["-c", STUCK]) as (process, client):
        assert client.get("/healthz").status_code == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - began < DRAIN_SECONDS + 5
        assert process.stderr.read() == "stopped\n"


@pytest.mark.timeout(240)
def test_a_key_that_was_made_opens_the_service_and_is_in_no_output(tmp_path):
    made = ragkv("key", "acme", cwd=tmp_path)
    key, pair = (re.search(rf"^{name} +(\S+)$", made.stdout, re.M)[1] for name in ("key", "setting"))
    (tmp_path / "keys").write_text(pair + "\n")
    doctor = ragkv("doctor", cwd=tmp_path, RAGKV_API_KEYS=pair)
    with served(tmp_path, RAGKV_API_KEYS="keys", RAGKV_HOST="0.0.0.0") as (process, client):
        url = f"http://127.0.0.1:{client.base_url.port}"
        refused = httpx.get(f"{url}/v1/models", headers={"X-API-Key": f"{key}x"})
        assert refused.status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"X-API-Key": key}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        told, log = process.stderr.read(), (tmp_path / "log").read_text()
    assert "without a valid key" in log
    assert "WARNING" not in told
    for secret in (key, pair.partition("=")[2]):
        assert secret not in told + log + doctor.stdout + doctor.stderr + refused.text
    wrong = ragkv("serve", cwd=tmp_path, RAGKV_API_KEYS=f"acme={key}")
    assert (wrong.returncode, told_in_words(wrong)) == (2, True)
    assert key not in wrong.stderr
    assert ragkv("key", "a:b", cwd=tmp_path).returncode == 1


@pytest.mark.timeout(240)
def test_bad_files_are_refused_one_by_one_and_the_good_ones_go_in(tmp_path):
    bad = {
        "empty.txt": b"",
        "white.txt": b" \n\t\n",
        "binary.txt": bytes(range(256)) * 4,
        "latin.txt": "Käse".encode("latin-1"),
        "huge.txt": b"A line of a very long tale.\n" * (50 * 2**20 // 28),
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("The harbour of Tarn was built in 1889 by Ada Brook.")
    done = ragkv("ingest", *sorted(bad), "good.txt", "missing.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert told_in_words(done)
    told = done.stderr.splitlines()
    for name in [*bad, "missing.txt"]:
        assert sum(name in line for line in told) == 1, name
    assert "16777216" in done.stderr or "16 MiB" in done.stderr
    listed = ragkv("ls", cwd=tmp_path)
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["good.txt"]


@pytest.mark.timeout(240)
def test_questions_that_cannot_be_asked_cost_nothing_but_an_exit_code(tmp_path):
    (tmp_path / "good.txt").write_text("The harbour of Tarn was built in 1889 by Ada Brook.")
    assert ragkv("ingest", "good.txt", cwd=tmp_path).returncode == 0
    (tmp_path / "q.jsonl").write_text(json.dumps({"q": "why " * 10_000}))
    for arguments, word in ((["--file", "q.jsonl"], "2048"), (["   "], "empty")):
        done = ragkv("ask", *arguments, cwd=tmp_path)
        assert done.returncode == 1
        assert told_in_words(done)
        assert word in done.stderr
    unknown = ragkv("ask", "Who?", cwd=tmp_path, RAGKV_MODEL="/no/such/model")
    assert unknown.returncode == 2
    assert told_in_words(unknown)
    assert "/no/such/model" in unknown.stderr
    done = ragkv("ask", "Who built the harbour of Tarn?", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["answer"] == "Ada Brook"


@pytest.mark.timeout(240)
def test_a_redis_that_is_down_at_start_loses_nothing(tmp_path):
    with redis_server() as server:
        url, port = server.url, server.port
    down = {"RAGKV_STORE": url}
    done = ragkv("ingest", *LIGHT, cwd=tmp_path, **down)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    asked = ragkv("ask", QUESTION, "--json", cwd=tmp_path, **down)
    answer = json.loads(asked.stdout)
    assert answer["answer"] == ANSWER
    assert len(answer["report"]["cache"]["fallbacks"]) == answer["report"]["cache"]["chunks"]
    with redis_server(port=port):  # it comes back: what is encoded is stored, and found the next time
        ragkv("ask", QUESTION, cwd=tmp_path, **down)
        again = json.loads(ragkv("ask", QUESTION, "--json", cwd=tmp_path, **down).stdout)
    assert again["report"]["ratios"]["cache_hit"] == 1.0
    assert again["answer"] == ANSWER


def test_a_start_calls_nobody_and_a_model_that_is_not_here_is_named(tmp_path):
    with set_trap() as trap:
        names = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        caught = {**dict.fromkeys(names, trap.url), "NO_PROXY": "", "no_proxy": "", "HF_HOME": str(tmp_path)}
        with served(tmp_path, HF_HUB_OFFLINE="0", **caught) as (_, client):
            assert client.get("/readyz").status_code == 200
        assert not trap.called()
        refused = ragkv("serve", "--port", "0", "--model", "nobody/nothing", cwd=tmp_path, **caught)
        assert (refused.returncode, told_in_words(refused)) == (2, True)
        assert "nobody/nothing" in refused.stderr
        assert not trap.called(), "HF_HUB_OFFLINE is set here"
