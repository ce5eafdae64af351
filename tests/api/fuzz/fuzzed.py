"""A service under attack: the process, who watches it, and what is checked after every request."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.api.fuzz.requests import KEPT, KEY
from tests.api.fuzz.wire import PATIENCE, Answer, Request, send
from tests.program import ragkv, served

LONGEST = 0.25
"""Seconds that a question for health may wait while a small request is served."""
REPEATS = 2
"""How often a request that seemed to hold up others is sent again. It did so if every repeat does: a machine with other
work stops anything for a moment, but not three times at the same request."""
READY_SECONDS = 60.0
JOB_SECONDS = 1.0
"""How long a job may go on beside its request; then it is cancelled."""
MOST_FAULTS = 40
SETTINGS = {
    "RAGKV_API_KEYS": f"fuzz={hashlib.sha256(KEY.encode()).hexdigest()}",
    "RAGKV_HOSTS": "127.0.0.1",
    "RAGKV_MAX_DOCUMENT_BYTES": str(2**20),
    "RAGKV_PARSE_SECONDS": "5",
    "RAGKV_CHUNK_TOKENS": "128",
    "RAGKV_MAX_TOKENS": "2",
    "RAGKV_TOP_K": "2",
    "RAGKV_CONNECTIONS": "0",
}
"""Of the service: small, so that it is quick."""


class Watcher:
    """Asks for the service's health without pause, on a connection of its own."""

    def __init__(self, port: int):
        self._port, self._ended = port, threading.Event()
        self._started, self._rounds = 0.0, 0
        self._longest = 0.0
        self.lost = 0
        self.status = b""
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Forget how long it waited until now."""
        self._longest = 0.0

    def longest(self) -> float:
        """Return the longest wait since the last reset, after a round that began now."""
        first, ends = self._rounds, time.monotonic() + PATIENCE
        while self._rounds < first + 2 and time.monotonic() < ends:
            time.sleep(0.002)
        return max(self._longest, time.monotonic() - self._started if self._started else 0.0)

    def close(self) -> None:
        """Stop to ask."""
        self._ended.set()
        self._thread.join(35)

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=30) as connection:
                    while not self._ended.is_set():
                        self._ask(connection)
                        self._ended.wait(0.005)
            except OSError:
                self.lost += 1
                self._ended.wait(0.05)
            finally:
                self._started = 0.0
                self._rounds += 1

    def _ask(self, connection: socket.socket) -> None:
        self._started = time.monotonic()
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        data = b""
        while not data.endswith(b"}"):
            more = connection.recv(65536)
            if not more:
                raise ConnectionResetError
            data += more
        self.status = data.split(b" ", 2)[1]
        self._longest = max(self._longest, time.monotonic() - self._started)
        self._started = 0.0
        self._rounds += 1


@dataclass
class Seen:
    """What a run has seen.

    Attributes:
        sent: Requests by kind.
        statuses: Statuses of their answers.
        faults: What went wrong, once for each kind of request and of fault.
        waits: Longest wait for health beside each request, in seconds.
    """

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)


class FuzzedService:
    """`ragkv serve` with a key, on a folder that it is started on again and again."""

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, Seen()
        self._running = ExitStack()
        self._process: Any = None
        self.port = 0
        self._data = 0
        self._jobs: set[str] = set()
        self.start()

    def start(self) -> None:
        """Start the service on the data folder as it is, and wait until it is ready."""
        data = self.folder / f"data{self._data}"
        self._process, self.client = self._running.enter_context(served(self.folder, RAGKV_DATA=str(data), **SETTINGS))
        self.client.headers["Authorization"] = f"Bearer {KEY}"
        self.port = int(str(self.client.base_url).rstrip("/").rpartition(":")[2])
        self.told: list[str] = []
        threading.Thread(target=_drained, args=(self._process.stderr, self.told), daemon=True).start()
        ends = time.monotonic() + READY_SECONDS
        while self.client.get("/readyz").status_code != 200:
            assert time.monotonic() < ends, self.client.get("/readyz").text
            time.sleep(0.05)
        self._keep()
        self._watcher = Watcher(self.port)

    def close(self) -> None:
        """Kill the service."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._watcher.close()
        self._running.close()

    @property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document."""
        found: dict[str, Any] = self.client.get("/openapi.json").json()
        return found

    def check(self, request: Request) -> None:
        """Send a request and note what is wrong: with its answer, with others meanwhile, or with the service."""
        if len(self.seen.faults) >= MOST_FAULTS:
            return
        self.seen.sent[request.kind] += 1
        faults, longest = self._attempt(request)
        if longest > LONGEST and request.small:
            again = [self._attempt(request)[1] for _ in range(REPEATS)]
            if min(again) > LONGEST:
                faults.append(f"held up /healthz for {longest:.2f}, then {again} s")
        for fault in faults:
            symptom = re.sub(r"[\d.]+", "N", fault)[:60]
            self.seen.faults.setdefault((request.kind, symptom), self._described(request, fault))

    def _described(self, request: Request, fault: str) -> str:
        return f"{fault}\n    {request!r}\n    {request.replay(self.port)}"

    def _attempt(self, request: Request) -> tuple[list[str], float]:
        self._watcher.reset()
        try:
            answer = send(self.port, request)
        except OSError as error:
            answer = Answer(0, b"", f"no connection: {error}", 0.0)
        self.seen.statuses[answer.status] += 1
        faults = [answer.fault] if answer.fault else []
        if answer.status >= 500 and answer.status != 503:
            faults.append(f"status {answer.status}: {answer.body[:200]!r}")
        try:
            if answer.status in (0, 200, 202, 207) and not request.wire.startswith((b"GET ", b"HEAD ")):
                faults += self.drain()
        except (httpx.HTTPError, OSError, KeyError, ValueError) as error:
            faults.append(f"afterwards {type(error).__name__}: {error}")
        longest = self._watcher.longest()
        self.seen.waits.append(longest)
        return faults + self._lives(), longest

    def drain(self) -> list[str]:
        """Wait for all jobs; then everything that is there can be listed, and goes."""
        faults = self._finish()
        for name in [each["name"] for each in self._get("/v1/collections")["collections"]]:
            faults += self._listed(name)
            if name != "kept":
                gone = self.client.delete(f"/v1/collections/{_part(name)}")
                if gone.status_code not in (204, 404):
                    faults.append(f"collection {name[:30]!r}: DELETE is {gone.status_code}: {gone.text[:200]}")
        self._keep()
        return faults

    def _keep(self) -> None:
        """Add what is asked for, unless it is there."""
        known = self.client.get("/v1/documents/tarn", params={"collection": "kept"})
        if known.status_code == 404:
            kept = self.client.post("/v1/documents?wait=true&collection=kept", json=KEPT).json()
            assert kept["status"] == "completed", kept

    def _get(self, path: str, **params: Any) -> Any:
        response = self.client.get(path, params=params)
        response.raise_for_status()
        return response.json()

    def _listed(self, collection: str) -> list[str]:
        """Everything of a collection can be read."""
        faults, named = [], {"collection": collection}
        page = self.client.get("/v1/documents", params=named)
        if page.status_code != 200:
            return [f"listing a collection is {page.status_code}: {page.text[:200]}"]
        for document in page.json()["documents"][:3]:
            for end in ("", "/chunks"):
                shown = self.client.get(f"/v1/documents/{_part(document['id'])}{end}", params=named)
                if shown.status_code != 200:
                    faults.append(f"showing a document{end} is {shown.status_code}: {shown.text[:200]}")
        return faults

    def _finish(self) -> list[str]:
        """Wait for the jobs that are not done, and cancel those that take long. Returns the internal errors of jobs."""
        ends, cancelled = time.monotonic() + JOB_SECONDS, False
        while True:
            jobs = self._get("/v1/jobs", limit=20)["jobs"]
            waiting = [job["id"] for job in jobs if job["finished"] is None]
            if not waiting or time.monotonic() > ends + PATIENCE:
                break
            if time.monotonic() > ends and not cancelled:
                for id in waiting:
                    self.client.post(f"/v1/jobs/{id}/cancel")
                cancelled = True
            time.sleep(0.01)
        new, self._jobs = [job for job in jobs if job["id"] not in self._jobs], {job["id"] for job in jobs}
        faults = [f"a job goes on {PATIENCE:.0f} s after it was cancelled"] if waiting else []
        errors = [job["last_error"] for job in new if job["last_error"]]
        return faults + [f"a job ended in {error}" for error in errors if error["code"] == "internal_error"]

    def _lives(self) -> list[str]:
        """The process runs and its engine is well; if not, it is started again, on a new folder if need be."""
        if self._process.returncode is None and self._watcher.status == b"200":
            return []
        code, health = self._process.returncode, ""
        if code is None:
            ends = time.monotonic() + 5
            while self._watcher.status != b"200" and time.monotonic() < ends:
                time.sleep(0.05)
            if self._watcher.status == b"200":
                return []
            health = httpx.get(f"http://127.0.0.1:{self.port}/healthz").text
        faults = [f"the process ended with {code}" if code is not None else f"health is {health}"]
        self.close()
        try:
            self.start()
        except (AssertionError, httpx.HTTPError) as error:
            faults.append(f"a restart does not serve: {str(error)[:300]}")
            self._data += 1
            self._running.close()
            self.start()
        return faults

    def restart(self, waiting: Iterable[Request]) -> None:
        """Kill the service while these requests' jobs wait, start it on the same folder, and look at everything.

        Args:
            waiting: Requests that may leave jobs and documents.
        """
        requests = [*waiting]
        for request in requests:
            send(self.port, request)
        self._process.kill()
        self._process.wait(30)
        self.close()
        try:
            self.start()
            faults = self.drain() + self._lives()
        except (AssertionError, httpx.HTTPError) as error:
            faults = [f"a restart does not serve: {str(error)[:300]}"]
            self._data += 1
            self._running.close()
            self.start()
        data = self.folder / f"data{self._data}"
        told = ragkv("doctor", cwd=self.folder, RAGKV_DATA=str(data), **SETTINGS)
        if told.returncode not in (0, 1) or "Traceback" in told.stderr:
            faults.append(f"doctor ends with {told.returncode}: {told.stdout[-300:]} {told.stderr[-300:]}")
        for fault in faults:
            listed = "\n".join(self._described(request, "") for request in requests)
            self.seen.faults.setdefault(("restart", fault[:60]), f"{fault}, after{listed}")


def _part(name: str) -> str:
    return quote(name, safe="") if name not in (".", "..") else name.replace(".", "%2e")


def _drained(stream: Any, told: list[str]) -> None:
    """Read what a process says, so that it never waits for a reader."""
    try:
        for line in stream:
            told.append(line)
    except (OSError, ValueError):
        return
