"""A service of two replicas with real Ray, and clients that ask it without a pause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ragkv.locality import HEADER, affinity, rank
from tests.start_records import TINY, with_records

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"question": "Who built the harbour of Tarn?", "method": "scout", "max_tokens": 8}
START_SECONDS = 300
"""Longest time until replicas serve. A machine with other work starts processes slowly."""


@dataclass
class Replicated:
    """A service with two replicas.

    Attributes:
        process: `ragkv serve --replicas 2`.
        client: Its client.
        told: What it wrote to standard error and output.
    """

    process: subprocess.Popen[bytes]
    client: httpx.Client
    told: Path

    def counts(self, name: str, **labels: str) -> Counter[str]:
        """Return a metric by replica, added up over its other labels."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found[sample.labels["replica"]] += int(sample.value)
        return found

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas that are in service."""
        return sorted(self.counts("ragkv_queue_places"))

    def key(self, replica: str) -> dict[str, str]:
        """Return a header that names something whose home is this replica."""
        keys = (affinity("", "default", f"talk {number}") for number in range(1000))
        return {HEADER: next(key for key in keys if rank(key, self.replicas)[0] == replica)}

    def ask(self, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return self.client.post("/v1/answers", json={**QUESTION, **more}, headers=headers or {})


@contextmanager
def replicated(folder: Path, **environment: str) -> Iterator[Replicated]:
    """Run two replicas on a free port. Whatever is left of them at the end is killed."""
    with_records(folder / "data")
    small = {"RAGKV_MODEL": str(TINY), "RAGKV_DEVICE": "cpu", "RAGKV_THREADS": "1", "RAGKV_CHUNK_TOKENS": "128"}
    given = {**os.environ, "PYTHONPATH": str(ROOT), "RAGKV_HOST_BYTES": "0", **small, **environment}
    command = [sys.executable, "-m", "ragkv.cli", "serve", "--port", "0", "--replicas", "2"]
    told = folder / "told"
    with told.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=given, stdout=file, stderr=file)
    pids: set[int] = set()
    try:
        wait_until(lambda: "serving at" in told.read_text() or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, told.read_text()
        address = re.search(r"serving at (\S+)", told.read_text())
        assert address
        with httpx.Client(base_url=address[1], timeout=60) as client:
            service = Replicated(process, client, told)
            wait_until(lambda: len(service.replicas) == 2, 30)
            pids = descendants(process.pid)
            yield service
    finally:
        pids |= descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not running(pids), 10, must=False)
        for pid in running(pids):
            os.kill(pid, signal.SIGKILL)


def wait_until(true: Callable[[], bool], seconds: float, must: bool = True) -> float:
    """Wait until something is so; returns how long that took."""
    started = time.monotonic()
    while not true():
        if time.monotonic() - started > seconds:
            assert not must, f"not so after {seconds} s"
            break
        time.sleep(0.1)
    return time.monotonic() - started


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def running(pids: set[int]) -> set[int]:
    """Return those of the processes that have not ended."""
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found |= {pid} if state != "Z" else set()
    return found


def replica_processes(service: Replicated) -> list[int]:
    """Return the processes of the replicas, by the title that Ray gives them.

    Two replicas start within a hundredth of a second, so which process is which replica can't be told by time.
    """
    return [pid for pid in sorted(descendants(service.process.pid)) if "::ServeReplica:" in title(pid)]


def title(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@dataclass
class Load:
    """Clients that ask without a pause, each about something of its own.

    Attributes:
        service: Whom they ask.
        clients: How many they are.
        outcomes: What came of their questions, and when.
    """

    service: Replicated
    clients: int = 4
    outcomes: list[tuple[float, str]] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        headers = {HEADER: f"d-{number}"}
        with httpx.Client(base_url=self.service.client.base_url, timeout=60) as client:
            while not self._stop.is_set():
                try:
                    response = client.post("/v1/answers", json=QUESTION, headers=headers)
                except httpx.HTTPError as error:
                    self.outcomes.append((time.monotonic(), type(error).__name__))
                    continue
                self.outcomes.append((time.monotonic(), self._outcome(response)))
                if response.status_code == 503:
                    time.sleep(min(1.0, float(response.headers["retry-after"])))

    def _outcome(self, response: httpx.Response) -> str:
        if response.status_code != 200:
            return f"{response.status_code} {response.json().get('code')}"
        return "answered" if "Ada Brook" in response.json()["answer"] else f"wrong: {response.json()['answer']}"

    @property
    def kinds(self) -> Counter[str]:
        return Counter(kind for _, kind in self.outcomes)
