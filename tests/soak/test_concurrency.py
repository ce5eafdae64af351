"""A real service while fifty clients ask and others replace and delete documents: what may never happen, does not."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.engine.engine import Engine
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.pipeline import remove
from ragkv.model.decoder import DecoderModel
from ragkv.retrieval import Embedder
from tests.libraries import open_engine

SECONDS = 60.0
ASKERS = 50
LAMPS = 4
"""Documents that are replaced over and over."""
BOATS = 40
"""Documents that are deleted, each once and for good."""
HOST_MIB = 64
"""Memory for KV between questions. Beside what the service takes once it has answered one, it may grow by this and a
tenth: nothing else may grow."""

NAMES = (
    *("Adler", "Bennet", "Carver", "Dorrit", "Ellwood", "Farrow", "Gadsby", "Hartley"),
    *("Ingram", "Jessop", "Kendal", "Lorimer", "Mercer", "Norris", "Osgood", "Pascoe"),
    *("Quarles", "Radley", "Selwyn", "Tolland", "Unwin", "Vickers", "Waverly", "Yardley"),
    *("Abbot", "Barlow", "Cranmer", "Dalton", "Everett", "Fenwick", "Garland", "Hobart"),
)
GALES = "That autumn gales came in from the west and the boats stayed in the harbour for {n} days."


def keeper(lamp: int, version: int) -> str:
    """Another name for every lamp, and for eight versions of it in a row."""
    return NAMES[8 * lamp + version % 8]


def lamp_document(lamp: int, version: int) -> dict[str, str]:
    """Of one chunk, or of several, by version."""
    rest = "\n\n".join(GALES.format(n=10 * version + n) for n in range(1 + 5 * (version % 3)))
    text = f"The lamp {lamp} of Tarn is kept by Ada {keeper(lamp, version)}.\n\n{rest}"
    return {"id": f"lamp-{lamp}", "title": f"Lamp {lamp}, version {version}", "text": text}


def boat_document(boat: int) -> dict[str, str]:
    return {"id": f"boat-{boat}", "title": f"Boat {boat}", "text": f"The boat {boat} of Tarn was built by Ivo Marsh."}


class World:
    """What was done to the service, and when: what its answers are held against. Shared by all threads."""

    def __init__(self, client: httpx.Client, until: float):
        self.client, self.until = client, until
        self.sent = [0] * LAMPS  # latest version of each lamp that was sent
        self.done: list[list[tuple[float, int]]] = [[] for _ in range(LAMPS)]  # (when, version) that were completed
        self.deleted: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def over(self) -> bool:
        """The time is up, or something happened that may not."""
        return time.monotonic() > self.until or bool(self.faults)

    def pause(self, seconds: float) -> None:
        """Sleep, but not past the end."""
        time.sleep(max(0.0, min(seconds, self.until - time.monotonic())))

    def put(self, *documents: dict[str, str], patience: float = math.inf) -> str:
        """Send documents as one job and wait for its end; returns its status, "" when that took too long."""
        response = self.client.post("/v1/documents", json={"documents": documents})
        assert response.status_code == 202, response.text
        while time.monotonic() < patience:
            job = self.client.get(f"/v1/jobs/{response.json()['job_id']}").json()
            if job["finished"] is not None:
                return str(job["status"])
            time.sleep(0.1)
        return ""

    def check(self, began: float, answer: dict[str, Any]) -> None:
        """What an answer cites, and whom it names, was there between the question and the answer."""
        cited, keepers = dict[str, set[str]](), set[str]()
        for citation in answer["citations"]:
            cited.setdefault(citation["document_id"], set()).add(citation["title"])
            gone = self.deleted.get(citation["document_id"], math.inf)
            assert gone > began, f"{citation} was deleted {began - gone:.3f} s before the question"
            self.counts["boats cited"] += citation["document_id"].startswith("boat")
        for document, titles in cited.items():
            assert len(titles) == 1, f"two versions of {document}: {titles}"
            found = re.fullmatch(r"Lamp (\d+), version (\d+)", titles.pop())
            if found:
                which, version = int(found[1]), int(found[2])
                oldest = max(number for when, number in self.done[which] if when < began)
                assert oldest <= version <= self.sent[which], f"{document} version {version}, {oldest} was there"
                keepers.add(keeper(which, version))
        named = set(re.findall(r"\w+", answer["answer"])) & set(NAMES)
        assert named <= keepers, f"{named} is named, cited are {keepers}"
        self.counts["named"] += bool(named)
        report = answer["report"]["cache"]
        assert sum(report["hits"].values()) + report["misses"] == report["chunks"]
        assert {fallback["reason"] for fallback in report["fallbacks"]} <= {"missing"}
        self.counts["misses"] += report["misses"]
        self.counts["host hits"] += report["hits"]["host"]


def asker(world: World, number: int) -> None:
    """Asks without end; comes back later when told to."""
    rng = random.Random(number)
    while not world.over():
        question = f"Who keeps the lamp {rng.randrange(LAMPS)} of Tarn?"
        if rng.random() < 0.25:
            question = f"Who built the boat {rng.randrange(BOATS)} of Tarn?"
        began = time.monotonic()
        response = world.client.post("/v1/answers", json={"question": question})
        world.counts[str(response.status_code)] += 1
        if response.status_code == 429:
            world.pause(int(response.headers["retry-after"]))
            continue
        assert response.status_code == 200, response.text
        world.check(began, response.json())


def replacer(world: World, lamps: range) -> None:
    """Sends new versions of its lamps, one after another."""
    for version in itertools.count(1):
        for lamp in lamps:
            if world.over():
                return
            world.sent[lamp] = version
            if world.put(lamp_document(lamp, version), patience=world.until) != "completed":
                return  # not done before the end; it will be
            world.done[lamp].append((time.monotonic(), version))
            world.counts["replaced"] += 1


def deleter(world: World, beside: Engine) -> None:
    """Deletes boats from another process's side, as `ragkv rm` does; every fourth one while it is still waiting."""
    jobs = Jobs(beside.catalog, 2**20)
    for boat in range(BOATS):
        if world.over():
            return
        name = f"boat-{boat}"
        if boat % 4 == 3:
            response = world.client.post("/v1/documents", json=boat_document(boat))
            assert response.status_code == 202, response.text
        jobs.withdraw("default", name)
        if beside.catalog.find("default", name):
            remove(beside, "default", name)
        world.deleted[name] = time.monotonic()
        world.counts["deleted"] += 1
        world.pause(SECONDS / BOATS)


def resident(process: subprocess.Popen[bytes]) -> float:
    """Its resident memory in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024


def watcher(world: World, process: subprocess.Popen[bytes], peak: list[float]) -> None:
    """Looks at the service's memory and health."""
    while not world.over():
        peak[0] = max(peak[0], resident(process))
        health = world.client.get("/healthz", timeout=10)
        assert (health.status_code, health.json()["status"]) == (200, "ok"), health.text
        world.pause(1)


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`ragkv serve` on a free port, its output in the file `log`; (process, url)."""
    root = str(Path(__file__).resolve().parents[2])
    small = {"RAGKV_CHUNK_TOKENS": "128", "RAGKV_TOP_K": "4", "RAGKV_MAX_TOKENS": "6", "RAGKV_THREADS": "1"}
    small["RAGKV_HOST_BYTES"] = str(HOST_MIB * 2**20)
    command = [sys.executable, "-m", "ragkv.cli", "serve", "--port", "0", "--device", "cpu"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": root, **small}, stdout=log, stderr=log
        )
    try:
        while not (told := re.search(r"serving at (\S+)", (folder / "log").read_text())):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield process, told[1]
    finally:
        process.kill()
        process.wait()


def run_together(world: World, *parts: Callable[[], None]) -> None:
    """Every part in a thread of its own; what one of them raises is a fault."""

    def noted(part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            world.faults.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=noted, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 400)
def test_fifty_clients_ask_while_documents_change_and_go(
    tmp_path: Path, model: DecoderModel, embedder: Embedder
) -> None:
    peak = [0.0]
    with (
        service(tmp_path) as (process, url),
        httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=200)) as client,
        open_engine(tmp_path / "data", model, embedder) as beside,
    ):
        world = World(client, math.inf)
        boats = [boat_document(boat) for boat in range(BOATS) if boat % 4 != 3]
        assert world.put(*(lamp_document(lamp, 0) for lamp in range(LAMPS)), *boats) == "completed"
        for lamp in range(LAMPS):
            world.done[lamp].append((time.monotonic(), 0))
        assert client.post("/v1/answers", json={"question": "Who keeps the lamp 0 of Tarn?"}).status_code == 200
        before = resident(process)
        world.until = time.monotonic() + SECONDS
        run_together(
            world,
            *(lambda number=number: asker(world, number) for number in range(ASKERS)),
            lambda: replacer(world, range(0, LAMPS, 2)),
            lambda: replacer(world, range(1, LAMPS, 2)),
            lambda: deleter(world, beside),
            lambda: watcher(world, process, peak),
        )
        print(f"\n{dict(world.counts)}, {before:.0f} MiB, at most {peak[0]:.0f}")  # seen with -s
        assert not world.faults, world.faults[:3]
        assert world.counts["200"] >= ASKERS
        assert world.counts["replaced"] >= 1
        assert world.counts["deleted"] >= 1
        assert world.counts["boats cited"] >= 1
        assert world.counts["host hits"] >= 1
        assert peak[0] - before < 1.1 * HOST_MIB

        # Quiet: what was still waiting is read, and then nothing is left of anything.
        world.until = math.inf
        for lamp in range(LAMPS):
            assert world.put(lamp_document(lamp, world.sent[lamp])) == "completed"
            answer = world.client.post("/v1/answers", json={"question": f"Who keeps the lamp {lamp} of Tarn?"}).json()
            titles = {c["title"] for c in answer["citations"] if c["document_id"] == f"lamp-{lamp}"}
            assert titles == {f"Lamp {lamp}, version {world.sent[lamp]}"}
            assert not set(world.deleted) & {citation["document_id"] for citation in answer["citations"]}
        time.sleep(6)  # health is looked at every five seconds
        health = world.client.get("/healthz").json()
        assert (health["status"], health["waiting"], health["store_faults"], health["quarantined"]) == ("ok", 0, 0, 0)
        assert [pool["pinned"] for pool in health["tiers"].values()] == [0]
        assert set(beside.store.keys()) == beside.catalog.keys(), "no KV without a chunk, no chunk without KV"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert [line for line in log if not line.startswith(("loading the model", "serving at", "stopped"))] == []
