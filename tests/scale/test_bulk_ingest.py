"""`ragkv ingest --ray` with real workers: what a killed worker costs, what the next run does, and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from ragkv.catalog import Catalog
from ragkv.ingest.bulk.journal import MOST_ATTEMPTS
from tests.redis_server import RedisServer, redis_server

pytest.importorskip("ray.data")

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the old new ferry harbour bridge station library museum garden market river coast village train ticket".split()
IN_FLIGHT = 24
"""Chunks that a worker encodes together at most: a group of 1,024 tokens, at 45 tokens a chunk or more."""
WORKER = "ray::MapWorker"
SECONDS = 900.0


def write_documents(folder: Path, count: int) -> None:
    folder.mkdir()
    rng = random.Random(1)
    for number in range(count):
        lines = [f"{' '.join(rng.choices(WORDS, k=9)).capitalize()} {number}." for _ in range(3)]
        (folder / f"note{number:05}.txt").write_text("\n".join(lines))


@contextmanager
def ingesting(folder: Path, store: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`ragkv ingest … --json` in a folder, one thread a worker; it is ended at the end."""
    command = [sys.executable, "-m", "ragkv.cli", "ingest", *options, "--json", "--device", "cpu", "--store", store]
    settings = {"RAGKV_THREADS": "1", "RAGKV_STORE_BODY": "int8", "RAGKV_STORE_TIMEOUT": "10", "PYTHONPATH": str(ROOT)}
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def objects(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)


def ingest(folder: Path, store: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the objects that were printed."""
    with ingesting(folder, store, *options) as process:
        found = list(objects(process))
        return process.wait(SECONDS), found


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of workers that this command has started."""
    parents, names = dict[int, int](), dict[int, str]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, facts = int(status.parent.name), status.read_text().rpartition(")")[2].split()
            parents[pid], names[pid] = int(facts[1]), (status.parent / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
    return [pid for pid, name in names.items() if name.startswith(WORKER) and process.pid in ancestors(pid, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found = set[int]()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def stored_chunks(server: RedisServer, chunks: int) -> float:
    """How often a chunk was written: the SETs of the server over those of one chunk, its entry's and its lease's."""
    client = redis.Redis(port=server.port)
    calls = client.info("commandstats")["cmdstat_set"]["calls"]
    return float(calls / (client.dbsize() / chunks + 1))


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "count", [pytest.param(200, marks=pytest.mark.scale), pytest.param(5000, marks=pytest.mark.soak)]
)
def test_a_killed_worker_costs_what_was_in_flight_and_the_next_run_encodes_nothing(tmp_path: Path, count: int) -> None:
    write_documents(tmp_path / "docs", count)
    options = ("docs", "--data", "data", "--ray", "--workers")
    with redis_server() as server:
        killed, seen = list[int](), list[dict[str, Any]]()
        with ingesting(tmp_path, server.url, *options, "2") as process:
            for each in objects(process):
                seen.append(each)
                if len(seen) == count // 3:
                    killed = workers_of(process)
                    assert len(killed) == 2
                    os.kill(killed[0], signal.SIGKILL)
            assert process.wait(SECONDS) == 0, (tmp_path / "errors").read_text()
        sums = seen.pop()
        assert killed
        assert len({each["document_id"] for each in seen}) == len(seen) == count, "every document is told once"
        assert sums["failed"] == sums["replaced"] == 0
        assert sums["added"] + sums["unchanged"] == count
        assert sums["unchanged"] <= IN_FLIGHT
        assert sums["workers"] == 3, "one was started for the one that was killed"
        assert count - IN_FLIGHT <= sums["encoded_chunks"] <= count + IN_FLIGHT
        assert stored_chunks(server, count) <= count + IN_FLIGHT

        catalog = Catalog.open(tmp_path / "data" / "catalog.sqlite")
        try:
            assert catalog.count() == (count, count)
            assert {info.version for info in catalog.documents()} == {1}, "nobody stored a document twice"
        finally:
            catalog.close()

        before = stored_chunks(server, count)
        (tmp_path / "docs" / "broken.txt").write_bytes(b"\0\1\2")
        started = time.monotonic()
        code, found = ingest(tmp_path, server.url, *options, "1")
        print(f"{count} documents, again: {time.monotonic() - started:.1f} s")
        assert code == 1, "one file is refused"
        assert Counter(each["status"] for each in found[:-1]) == {"unchanged": count, "failed": 1}
        assert found[-1]["encoded_chunks"] == 0
        assert stored_chunks(server, count) == before
        assert "broken.txt" in (tmp_path / "errors").read_text()


def large_claims(data: Path) -> int:
    """How many ingests of large documents have begun to encode and have not ended, those of dead processes included."""
    if not (data / "catalog.sqlite").exists():
        return 0
    sql = "SELECT count(*) FROM (SELECT 1 FROM claimed GROUP BY claim HAVING count(*) > 10)"
    with closing(sqlite3.connect(data / "catalog.sqlite")) as connection:
        return int(connection.execute(sql).fetchone()[0])


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_document_whose_worker_dies_three_times_is_refused_and_the_others_go_in(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs", 20)
    (tmp_path / "docs" / "long.txt").write_text(
        " ".join(f"The ferry {n} came late to the harbour." for n in range(6000))
    )
    deaths = 0
    with redis_server() as server, ingesting(tmp_path, server.url, "docs", "--ray", "--workers", "1") as process:
        while deaths < MOST_ATTEMPTS:
            assert process.poll() is None, (tmp_path / "errors").read_text()
            time.sleep(0.1)
            if large_claims(tmp_path / "data") > deaths:
                (worker,) = workers_of(process)
                os.kill(worker, signal.SIGKILL)
                deaths += 1
        outcomes = {each.get("document_id"): each for each in objects(process)}
        assert process.wait(SECONDS) == 1
    assert "died each of the 3 times" in outcomes.pop("docs/long.txt")["error"]
    sums = outcomes.pop(None)
    assert (len(outcomes), sums["failed"], sums["workers"]) == (20, 1, 4)
    assert {each["status"] for each in outcomes.values()} <= {"added", "unchanged"}
