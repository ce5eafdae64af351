"""Several processes share a catalogue: each document is ingested once, and what a dead process left is taken over."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from ragkv.catalog import Catalog
from ragkv.ingest import leases
from ragkv.ingest.jobs import Jobs
from tests.ingest.reader import FileEngine, make_document, run_next

LIMIT = 100_000
Start = Callable[..., "subprocess.Popen[str]"]

COMMON = """
import sys, time
from pathlib import Path
from ragkv.ingest.jobs import Jobs
from tests.ingest.reader import FileEngine, run_next
folder, where = Path(sys.argv[1]), sys.argv[2]
where = where if where.startswith("postgresql") else Path(where)
"""
WORKER = """
def told(outcome):
    print(outcome.result, outcome.document_id, flush=True)

class Slow(FileEngine):
    def encode_and_store_all(self, chunks):
        time.sleep(0.05)  # so that one process alone does not do everything
        super().encode_and_store_all(chunks)

engine = Slow(folder, where=where)
jobs = Jobs(engine.catalog, 100_000, told)
jobs.recover()
print("ready", flush=True)
sys.stdin.readline()
while run_next(jobs, engine) or jobs.backlog().documents:
    pass
engine.close()
"""
# It stops before it encodes the second chunk, and goes on when it is told to.
STOPPING = """
class Stopping(FileEngine):
    def encode_and_store_all(self, chunks):
        super().encode_and_store_all(chunks)
        print("encoded", flush=True)
        sys.stdin.readline()

engine = Stopping(folder, where=where)
jobs = Jobs(engine.catalog, 100_000)
while run_next(jobs, engine):
    pass
print("done", flush=True)
"""


@pytest.fixture
def engine(tmp_path: Path, catalog_address: Path | str) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path, where=catalog_address)
    yield opened
    opened.close()


@pytest.fixture
def jobs(engine: FileEngine) -> Jobs:
    return Jobs(engine.catalog, LIMIT)


@pytest.fixture
def start(tmp_path: Path, catalog_address: Path | str, root: Path) -> Iterator[Start]:
    """Start a process with the same catalogue and the same KV."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMMON + script, str(tmp_path), str(catalog_address)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def statuses(jobs: Jobs, job_id: str) -> Counter[str]:
    return Counter(document.status for document in jobs.get(job_id).documents)


def test_two_processes_ingest_each_document_once(jobs: Jobs, start: Start) -> None:
    first = jobs.submit([make_document(f"d{n}", 60, n) for n in range(12)])
    newer = jobs.submit([make_document(f"d{n}", 60, n + 100) for n in range(6)])
    workers = [start(WORKER), start(WORKER)]
    for worker in workers:
        assert line(worker.stdout) == "ready"
    for worker in workers:
        go_on(worker)
    told = [worker.communicate(timeout=100)[0].split("\n")[:-1] for worker in workers]
    assert all(told), "both had something to do"
    results = Counter(told[0] + told[1])
    assert results == Counter([*(f"added d{n}" for n in range(12)), *(f"replaced d{n}" for n in range(6))])
    assert (statuses(jobs, first), statuses(jobs, newer)) == (Counter(completed=12), Counter(completed=6))


def test_a_start_leaves_what_a_living_process_ingests_to_it_and_takes_over_what_a_dead_one_did(
    jobs: Jobs, engine: FileEngine, start: Start
) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    worker = start(STOPPING)
    assert line(worker.stdout) == "encoded"
    assert jobs.recover() == 0
    assert run_next(jobs, engine) == job_id
    assert [each.status for each in jobs.get(job_id).documents] == ["running", "completed"]
    assert run_next(jobs, engine) is None
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    assert jobs.recover() == 1
    assert run_next(jobs, engine) == job_id
    assert jobs.get(job_id).status == "completed"
    assert engine.stored() == engine.catalog.keys()


def test_a_busy_process_takes_over_what_dies_with_another(
    jobs: Jobs, engine: FileEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.ingest.jobs.RECLAIM_SECONDS", 0.0)
    job_id = jobs.submit([make_document("a")])
    worker = start(STOPPING)
    assert line(worker.stdout) == "encoded"
    assert jobs.waiting() == []
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    (waiting,) = jobs.waiting()
    assert waiting.attempts == 1
    run_next(jobs, engine)
    assert jobs.get(job_id).status == "completed"


def expire(catalog: Catalog) -> None:
    """Let time pass for all leases."""
    with catalog.write() as transaction:
        transaction.exec_driver_sql("UPDATE leases SET expires = expires - 1000")


def test_who_lost_its_lease_records_nothing_more(jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a")])
    slept = jobs.steps(engine)
    for step in slept:
        if (step.stage, step.done) == ("encode", 2):
            break
    expire(engine.catalog)
    other = Jobs(engine.catalog, LIMIT)
    assert [each.died for each in lost(engine.catalog)] == [False], "it lives, on this machine"
    assert other.recover() == 1
    assert [each.attempts for each in other.waiting()] == [0]
    taken = other.steps(engine)
    next(taken)
    assert list(slept) == []
    assert statuses(jobs, job_id) == Counter(running=1), "it belongs to the other now"
    assert list(taken)
    assert statuses(jobs, job_id) == Counter(completed=1)
    assert engine.stored() == engine.catalog.keys()


def test_a_lease_is_renewed_while_a_step_takes_long(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    jobs.submit([make_document("a")])
    steps = jobs.steps(engine)
    next(steps)
    expire(engine.catalog)
    until = time.monotonic() + 20
    while lost(engine.catalog) and time.monotonic() < until:
        time.sleep(0.02)
    assert not lost(engine.catalog)
    assert Jobs(engine.catalog, LIMIT).recover() == 0
    steps.close()


def lost(catalog: Catalog) -> list[leases.LostDocument]:
    with catalog.read() as transaction:
        return leases.lost(transaction)


def test_a_dead_process_is_known_by_its_number_and_its_start() -> None:
    worker = leases.new_worker()
    machine, pid, began, name = worker.split("/")
    assert not leases.is_dead(worker)
    assert leases.is_dead("/".join((machine, pid, f"{began}0", name))), "another process had the number before"
    assert not leases.is_dead("/".join(("another", pid, f"{began}0", name)))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert leases.is_dead("/".join((machine, str(gone.pid), began, name)))
    assert leases.is_alive(worker)
    assert not leases.is_alive("/".join(("another", pid, began, name))), "nothing is known of it"
    assert not leases.is_alive("/".join((machine, str(gone.pid), began, name)))
