"""Jobs: the table is the truth, a bad document stops no other, and no crash loses work or repeats it without end."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv.catalog import database
from ragkv.errors import CatalogCorrupt, InputError, InvalidDocument, NotFound, StoreUnavailable
from ragkv.ingest import job_table, job_view
from ragkv.ingest.job_table import MAX_ATTEMPTS
from ragkv.ingest.jobs import Backlog, Counts, IngestJob, Jobs
from ragkv.ingest.loader import Rejected, read
from ragkv.ingest.pipeline import ingest, remove
from ragkv.ingest.turns import IngestTurns
from ragkv.types import Chunk, Document, Key
from tests.ingest.reader import FileEngine, make_document, run_next

LIMIT = 100_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def jobs(engine: FileEngine) -> Jobs:
    return Jobs(engine.catalog, LIMIT)


def run_all(jobs: Jobs, engine: FileEngine) -> int:
    count = 0
    while run_next(jobs, engine):
        count += 1
    return count


def statuses(job: IngestJob) -> list[str]:
    return [document.status for document in job.documents]


def ids(engine: FileEngine) -> list[str]:
    return [document.id for document in engine.catalog.documents()]


def test_a_job_goes_from_queued_to_completed(jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b", seed=1)])
    job = jobs.get(job_id)
    assert (job.status, statuses(job), job.started, job.finished) == ("queued", ["queued"] * 2, None, None)
    assert ids(engine) == []
    assert run_next(jobs, engine) == job_id
    assert (jobs.get(job_id).status, statuses(jobs.get(job_id))) == ("running", ["completed", "queued"])
    assert run_next(jobs, engine) == job_id
    job = jobs.get(job_id)
    assert (job.status, statuses(job), job.error) == ("completed", ["completed"] * 2, None)
    assert job.created <= (job.started or 0) <= (job.finished or 0)
    assert run_next(jobs, engine) is None
    assert ids(engine) == ["a", "b"]


def test_jobs_run_in_the_order_they_came(jobs: Jobs, engine: FileEngine) -> None:
    order = [jobs.submit([make_document(name)]) for name in "cab"]
    assert [run_next(jobs, engine) for _ in order] == order
    assert [job.id for job in jobs.recent()] == order[::-1]


def test_the_backlog_counts_waiting_documents_only(jobs: Jobs, engine: FileEngine) -> None:
    assert jobs.backlog() == Backlog(documents=0, queued=0, running=0)
    jobs.submit([make_document("a"), make_document("b", seed=1), Rejected("c", InvalidDocument("c"))])
    jobs.submit([make_document("d", seed=2)])
    assert jobs.backlog() == Backlog(documents=3, queued=2, running=0)
    run_next(jobs, engine)
    assert jobs.backlog() == Backlog(documents=2, queued=1, running=1)
    run_all(jobs, engine)
    assert jobs.backlog() == Backlog(documents=0, queued=0, running=0)


def test_the_backlog_scans_no_table(engine: FileEngine) -> None:
    with engine.catalog.read() as connection:
        asked: list[str] = []
        connection.driver.set_trace_callback(asked.append)
        job_view.backlog(connection)
        connection.driver.set_trace_callback(None)
        plans = [row[-1] for sql in asked for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}")]
    assert len(plans) >= 3
    assert not [plan for plan in plans if "USING" not in plan or plan.startswith("SCAN")], plans


def test_a_bad_document_fails_alone(jobs: Jobs, engine: FileEngine) -> None:
    items: list[Document | Rejected] = [
        make_document("a"),
        Document("empty", "t", "  "),
        Document("nul", "t", "a\0b"),
        Document("large", "t", "x" * (LIMIT + 1)),
        Document("half \ud800", "t", "text"),
        Rejected("notes.pdf", InvalidDocument("notes.pdf: unknown format")),
        make_document("b"),
    ]
    job_id = jobs.submit(items)
    assert run_all(jobs, engine) == 2
    job = jobs.get(job_id)
    assert job.status == "completed"
    assert statuses(job) == ["completed", "failed", "failed", "failed", "failed", "failed", "completed"]
    assert [document.error.code for document in job.documents if document.error] == [
        "invalid_document", "invalid_document", "too_large", "invalid_document", "invalid_document",
    ]  # fmt: skip
    assert ids(engine) == ["a", "b"]


def test_a_job_of_nothing_but_bad_documents_has_failed_at_once(jobs: Jobs, engine: FileEngine) -> None:
    job = jobs.get(jobs.submit([*read(b"\xff", "a.txt", LIMIT)]))
    assert (job.status, statuses(job)) == ("failed", ["failed"])
    assert job.error is not None
    assert "not UTF-8" in job.error.message
    assert job.finished
    assert run_next(jobs, engine) is None


def test_an_unexpected_error_fails_the_document_and_the_queue_moves_on(
    jobs: Jobs, engine: FileEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(FileEngine):
        def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
            if any(chunk.document_id == "a" for chunk, _ in chunks):
                raise ZeroDivisionError("secret detail")
            super().encode_and_store_all(chunks)

    engine.__class__ = Breaking
    job_id = jobs.submit([make_document("a"), make_document("b")])
    run_all(jobs, engine)
    job = jobs.get(job_id)
    assert statuses(job) == ["failed", "completed"]
    error = job.documents[0].error
    assert error is not None
    assert error.code == "internal_error"
    assert "secret" not in error.message
    assert "secret detail" in caplog.text
    assert engine.stored() == engine.catalog.keys()


def test_a_job_needs_documents_of_one_collection(jobs: Jobs) -> None:
    for items in ([], [make_document("a"), make_document("b", collection="other")]):
        with pytest.raises(InputError, match="one collection"):
            jobs.submit(items)


def test_an_unknown_job_is_not_found(jobs: Jobs) -> None:
    for ask in (jobs.get, jobs.cancel):
        with pytest.raises(NotFound, match="no job 'x'"):
            ask("x")


def test_finished_documents_keep_no_payload(jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit([make_document("a"), Document("bad", "t", "")])
    cancelled = jobs.submit([make_document("b")])
    jobs.cancel(cancelled)
    run_all(jobs, engine)
    with engine.catalog.read() as connection:
        assert connection.exec_driver_sql(
            "SELECT count(*) FROM job_documents WHERE payload IS NOT NULL"
        ).fetchone() == (0,)


def test_old_jobs_are_deleted(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "KEPT_JOBS", 2)
    waiting = jobs.submit([make_document("a")])
    failed = [jobs.submit([Document("bad", "t", " " * n)]) for n in range(4)]
    assert [job.id for job in jobs.recent()] == [failed[3], failed[2], waiting], (
        "a job that still waits is never deleted"
    )
    with pytest.raises(NotFound):
        jobs.get(failed[0])


# Twice the same


def test_the_same_documents_waiting_twice_are_one_job(jobs: Jobs, engine: FileEngine) -> None:
    first = jobs.submit([make_document("a")])
    assert jobs.submit([make_document("a")]) == first
    assert jobs.submit([make_document("a", collection="other")]) != first
    assert jobs.submit([make_document("a"), make_document("b")]) != first


def test_the_last_version_sent_wins(jobs: Jobs, engine: FileEngine) -> None:
    one, two = make_document("a", seed=1), make_document("a", seed=2)
    first, second, third = (jobs.submit([version]) for version in (one, two, one))
    assert len({first, second, third}) == 3
    run_all(jobs, engine)
    assert engine.catalog.original("default", "a") == one


def test_concurrent_submissions_of_one_document_are_one_job(jobs: Jobs, engine: FileEngine) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(jobs.submit([make_document("a")]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_finished_job_is_not_joined(jobs: Jobs, engine: FileEngine) -> None:
    first = jobs.submit([make_document("a")])
    run_all(jobs, engine)
    assert jobs.submit([make_document("a")]) != first
    encoded = engine.encoded
    run_all(jobs, engine)
    assert engine.encoded == encoded


# Progress, cancelling, deleting and pausing


def test_progress_is_recorded_while_a_document_is_ingested(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.ingest.job_steps.REPORT_SECONDS", 0.0)
    job_id, seen = jobs.submit([make_document("a")]), []
    run_next(jobs, engine, lambda: seen.append(jobs.get(job_id)))
    assert {job.status for job in seen} == {"running"}
    assert {"split", "embed", "encode"} <= {job.stage for job in seen}
    assert all(job.done <= job.total for job in seen)


def test_of_a_small_document_only_the_encoding_is_written_down(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.ingest.job_steps.REPORT_SECONDS", 60.0)
    job_id, seen = jobs.submit([make_document("a")]), []
    run_next(jobs, engine, lambda: seen.append(jobs.get(job_id)))
    assert {job.stage for job in seen} <= {"", "encode"}
    assert seen[-1].stage == "encode"


def test_cancelling_stops_between_chunks_and_leaves_nothing(jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])

    def cancel_while_encoding() -> None:
        if engine.encoded == 2:
            jobs.cancel(job_id)

    assert run_next(jobs, engine, cancel_while_encoding) == job_id
    job = jobs.get(job_id)
    assert (job.status, statuses(job)) == ("cancelled", ["cancelled"] * 2)
    assert job.finished
    assert run_next(jobs, engine) is None
    assert (ids(engine), engine.stored()) == ([], set())
    assert engine.encoded == 2


def test_cancelling_keeps_what_is_in_the_catalogue(jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    run_next(jobs, engine)
    job = jobs.cancel(job_id)
    assert (job.status, statuses(job)) == ("cancelled", ["completed", "cancelled"])
    assert jobs.cancel(job_id) == job, "a finished job stays as it is"
    assert ids(engine) == ["a"]


def test_a_deleted_document_is_not_brought_back_by_a_job(jobs: Jobs, engine: FileEngine) -> None:
    ingest(engine, make_document("a"))
    job_id = jobs.submit([make_document("a", seed=2), make_document("b")])
    other = jobs.submit([make_document("a", seed=3)])
    theirs = jobs.submit([make_document("a", collection="theirs")])

    def delete_while_encoding() -> None:
        if engine.catalog.find("default", "a") and jobs.get(job_id).stage == "encode":
            assert jobs.withdraw("default", "a")
            remove(engine, "default", "a")

    run_next(jobs, engine, delete_while_encoding)
    run_all(jobs, engine)
    assert statuses(jobs.get(job_id)) == ["cancelled", "completed"]
    assert jobs.get(job_id).status == "completed"
    assert jobs.get(other).status == "cancelled"
    assert jobs.get(theirs).status == "completed"
    assert [(d.collection, d.id) for d in engine.catalog.documents()] == [("default", "b"), ("theirs", "a")]
    assert engine.stored() == engine.catalog.keys()
    assert not jobs.withdraw("default", "a")


@pytest.mark.parametrize("when", ["before its transaction", "inside it"])
def test_a_document_deleted_at_the_last_moment_does_not_come_back(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def delete() -> None:
        assert jobs.withdraw("default", "a")
        with contextlib.suppress(NotFound):
            remove(engine, "default", "a")

    deleting, put = threading.Thread(target=delete), engine.catalog.put_document

    def put_late(*arguments: Any) -> list[Key]:
        *others, check_wanted = arguments

        def check_late() -> None:
            deleting.start()  # it has to wait until the transaction is over
            check_wanted()

        if when == "inside it":
            unreferenced = put(*others, check_late)
            deleting.join()  # before the job writes down that the document is there
            return unreferenced
        deleting.start()
        deleting.join()
        return put(*arguments)

    monkeypatch.setattr(engine.catalog, "put_document", put_late)
    job_id = jobs.submit([make_document("a"), make_document("b")])
    run_next(jobs, engine)
    monkeypatch.undo()
    assert (statuses(jobs.get(job_id)), ids(engine)) == (["cancelled", "queued"], [])
    run_all(jobs, engine)
    assert (ids(engine), engine.stored()) == (["b"], engine.catalog.keys())


def test_a_collection_that_was_deleted_is_not_brought_back(jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    theirs = jobs.submit([make_document("a", collection="theirs")])
    run_next(jobs, engine)
    assert jobs.abandon("default")
    engine.evict(engine.catalog.clear("default"))
    assert not jobs.abandon("default")
    run_all(jobs, engine)
    assert (statuses(jobs.get(job_id)), jobs.get(job_id).status) == (["completed", "cancelled"], "completed")
    assert jobs.get(theirs).status == "completed"
    assert [(d.collection, d.id) for d in engine.catalog.documents()] == [("theirs", "a")]
    assert engine.stored() == engine.catalog.keys()
    with pytest.raises(NotFound, match="no collection 'default'"):
        engine.catalog.clear("default")


def test_a_document_with_the_same_content_is_unchanged(jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit([make_document("a")])
    run_all(jobs, engine)
    encoded = engine.encoded
    job_id = jobs.submit([make_document("a"), Document("bad", "", " ")])
    run_all(jobs, engine)
    job = jobs.get(job_id, "failed")
    assert (job.status, engine.encoded) == ("completed", encoded)
    assert job.counts == Counts(2, 2, completed=0, unchanged=1, failed=1, cancelled=0)
    assert [document.id for document in job.documents] == ["bad"]
    assert job.last_error == job.documents[0].error
    assert statuses(jobs.get(job_id)) == ["unchanged", "failed"]


def test_a_break_between_two_documents_does_not_count_as_time_they_need(jobs: Jobs, engine: FileEngine) -> None:
    job_id, seen = jobs.submit([make_document(name) for name in "abc"]), list[float | None]()
    began = time.monotonic()
    run_next(jobs, engine, lambda: seen.append(jobs.get(job_id).eta_seconds))
    assert seen[0] is None, "nothing is known yet"
    took = time.monotonic() - began
    with engine.catalog.write() as connection:
        connection.exec_driver_sql("UPDATE jobs SET started = started - 10000, updated = updated - 10000")
    run_next(jobs, engine, lambda: seen.append(jobs.get(job_id).eta_seconds))
    assert seen[-1] is not None
    assert seen[-1] < 20 * took + 1


def test_a_pause_puts_the_document_back_with_what_is_encoded(tmp_path: Path, jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a")])
    run_next(jobs, engine, lambda: jobs.pause() if engine.encoded == 3 else None)
    job = jobs.get(job_id)
    assert (job.status, statuses(job)) == ("queued", ["queued"])
    assert run_next(jobs, engine) is None, "a paused queue starts nothing"
    assert len(engine.stored()) == 3

    later = Jobs(engine.catalog, LIMIT)
    assert later.recover() == 0
    assert run_next(later, engine) == job_id
    assert later.get(job_id).status == "completed"
    assert engine.encoded == len(engine.stored())


def test_a_closed_ingest_puts_the_document_back_with_what_is_encoded(jobs: Jobs, engine: FileEngine) -> None:
    job_id = jobs.submit([make_document("a")])
    for _ in range(MAX_ATTEMPTS + 1):
        steps = jobs.steps(engine)
        for step in steps:
            if (step.stage, step.done) == ("encode", 3):
                break
        steps.close()
        job = jobs.get(job_id)
        assert (job.status, statuses(job), len(engine.stored())) == ("queued", ["queued"], 3)
    assert run_all(jobs, engine) == 1
    assert jobs.get(job_id).status == "completed"
    assert engine.encoded == len(engine.stored())


def test_the_steps_of_a_job_end_with_the_commit(jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit([make_document("a")])
    steps = list(jobs.steps(engine))
    assert list(dict.fromkeys(step.stage for step in steps)) == ["split", "embed", "encode", "commit"]
    assert list(jobs.steps(engine)) == []


# Crashes and full disks


PROCESS = """
import sys, time
from pathlib import Path
from ragkv.ingest.jobs import Jobs
from tests.ingest.reader import FileEngine, run_next

class Slow(FileEngine):
    def encode_and_store_all(self, chunks):
        super().encode_and_store_all(chunks)
        print(*(chunk.id for chunk, _ in chunks), flush=True)
        time.sleep(0.05)

engine = Slow(Path(sys.argv[1]))
jobs = Jobs(engine.catalog, 100_000)
jobs.recover()
while run_next(jobs, engine):
    pass
"""


def test_a_killed_process_loses_nothing_and_does_not_start_over(
    tmp_path: Path, root: Path, jobs: Jobs, engine: FileEngine
) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    worker = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "a#0\n"
    assert worker.stdout.readline() == "a#1\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    worker.stdout.close()
    assert jobs.get(job_id).status == "running"
    kept = engine.stored()
    assert kept
    assert Jobs(engine.catalog, LIMIT).recover() == 1
    assert jobs.get(job_id).status == "queued"
    assert run_all(jobs, engine) == 2
    assert jobs.get(job_id).status == "completed"
    assert kept <= engine.stored() == engine.catalog.keys()
    assert engine.encoded == len(engine.stored()) - len(kept)


def test_a_document_that_keeps_killing_the_process_is_given_up(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(SystemExit):
        pass

    def die(chunks: Iterable[tuple[Chunk, str]]) -> None:
        raise Dying

    job_id = jobs.submit([make_document("a"), make_document("b")])
    monkeypatch.setattr(engine, "encode_and_store_all", die)
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(Dying):
            run_next(jobs, engine)
        jobs.recover()
    monkeypatch.undo()
    assert statuses(jobs.get(job_id)) == ["failed", "queued"]
    error = jobs.get(job_id).documents[0].error
    assert error is not None
    assert error.code == "interrupted"
    run_all(jobs, engine)
    assert ids(engine) == ["b"]


@pytest.mark.parametrize("fault", [RecursionError, MemoryError, KeyError, type("PanicException", (BaseException,), {})])
def test_whatever_an_ingest_raises_ends_its_document_alone(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    encode = engine.encode_and_store_all

    def fail(chunks: Iterable[tuple[Chunk, str]]) -> None:
        if any(chunk.document_id == "b" for chunk, _ in chunks):
            raise fault
        encode(chunks)

    monkeypatch.setattr(engine, "encode_and_store_all", fail)
    job_id = jobs.submit([make_document("a"), make_document("b"), make_document("c")])
    run_all(jobs, engine)
    assert statuses(jobs.get(job_id)) == ["completed", "failed", "completed"]
    assert jobs.set_aside() == []


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(f'["t", "text", {{"a": {"[" * 982}{"]" * 982}}}]', id="982 levels"),
        pytest.param(f'["t", "text", {{"a": {"[" * 100_000}{"]" * 100_000}}}]', id="very deep"),
        pytest.param(f'["t", "text", {{"a": {"[" * 16}{"]" * 16}}}]', id="a level too many"),
        pytest.param('["t", "text", 5]', id="metadata is a number"),
        pytest.param('["t"]', id="no text"),
        pytest.param('["t", "text", {}, [[1]]]', id="pages without numbers"),
        pytest.param("{", id="no JSON"),
        pytest.param(None, id="nothing"),
    ],
)
def test_what_the_queue_cannot_tell_is_set_aside_and_stops_nothing(
    jobs: Jobs, engine: FileEngine, payload: str | None
) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    with engine.catalog.write() as transaction:  # as a version without limits has accepted it
        transaction.exec_driver_sql("UPDATE job_documents SET payload = ? WHERE id = 'a'", (payload,))
    run_all(jobs, engine)
    assert statuses(jobs.get(job_id)) == ["failed", "completed"]
    (aside,) = jobs.set_aside()
    assert (aside.job_id, aside.document_id, aside.reason[:10]) == (job_id, "a", "set aside:")
    assert jobs.forget_set_aside() == 1
    assert (jobs.set_aside(), statuses(jobs.get(job_id))) == ([], ["cancelled", "completed"])


def test_a_title_of_the_queue_that_is_too_long_is_cut(jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit([make_document("a")])
    with engine.catalog.write() as transaction:
        payload = json.dumps(["T" * 100_000, "The text of Tarn.", {}])
        transaction.exec_driver_sql("UPDATE job_documents SET payload = ? WHERE id = 'a'", (payload,))
    run_all(jobs, engine)
    assert engine.catalog.original("default", "a").title == "T" * 511 + "…"


def test_who_is_told_of_an_outcome_does_not_change_it(engine: FileEngine) -> None:
    def fail(outcome: object) -> None:
        raise OSError

    jobs = Jobs(engine.catalog, LIMIT, fail)
    job_id = jobs.submit([make_document("a"), Document("b", "b", "")])
    run_all(jobs, engine)
    assert statuses(jobs.get(job_id)) == ["completed", "failed"]


def test_pauses_do_not_count_as_deaths(engine: FileEngine) -> None:
    job_id = Jobs(engine.catalog, LIMIT).submit([make_document("a")])
    for _ in range(MAX_ATTEMPTS + 1):
        jobs = Jobs(engine.catalog, LIMIT)
        jobs.recover()
        run_next(jobs, engine, jobs.pause)
    assert statuses(jobs.get(job_id)) == ["queued"]


def attempts(engine: FileEngine) -> list[int]:
    with engine.catalog.read() as transaction:
        return [count for (count,) in transaction.exec_driver_sql("SELECT attempts FROM job_documents ORDER BY 1")]


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what was left behind whenever it is asked what waits."""
    monkeypatch.setattr("ragkv.ingest.jobs.RECLAIM_SECONDS", 0.0)


@pytest.mark.usefixtures("always_looking")
def test_open_documents_that_meet_a_silent_catalogue_are_queued_again_and_not_blamed(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = [jobs.submit([make_document(name, words=20)]) for name in "abc"]
    turns = IngestTurns(jobs).steps(engine)
    while attempts(engine) != [1, 1, 1]:
        next(turns)

    def silent(**_: object) -> object:
        raise StoreUnavailable("the catalogue does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(engine.catalog, "write", silent)
        turns.close()
    assert [each.attempts for each in jobs.waiting()] == [0, 0, 0]
    assert run_all(jobs, engine) == 3
    assert [jobs.get(job_id).status for job_id in submitted] == ["completed"] * 3


@pytest.mark.usefixtures("always_looking")
def test_an_outcome_is_recorded_although_nothing_else_waits(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, write = jobs.submit([make_document("a")]), engine.catalog.write
    steps = jobs.steps(engine)
    while next(steps).stage != "commit":
        pass

    def silent(**options: Any) -> object:
        if not options.get("durable", True):  # the document is committed, what came of it is not recorded
            raise StoreUnavailable("the catalogue does not answer")
        return write(**options)

    with monkeypatch.context() as broken:
        broken.setattr(engine.catalog, "write", silent)
        with pytest.raises(StoreUnavailable):
            list(steps)
    assert jobs.waiting() == []
    assert jobs.get(job_id).status == "completed"


@pytest.mark.usefixtures("always_looking")
def test_an_outcome_that_a_crash_of_the_catalogue_lost_is_found_again_without_a_death(
    jobs: Jobs, engine: FileEngine
) -> None:
    job_id = jobs.submit([make_document("a")])
    steps = jobs.steps(engine)
    next(steps)
    tables = ("jobs", "job_documents", "leases")
    with engine.catalog.read() as transaction:
        before = [transaction.exec_driver_sql(f"SELECT * FROM {name}").fetchall() for name in tables]
    list(steps)
    assert jobs.get(job_id).status == "completed"
    with engine.catalog.write() as transaction:
        for name, rows in zip(tables, before, strict=True):
            transaction.exec_driver_sql(f"DELETE FROM {name}")
            for row in rows:
                marks = ", ".join("?" * len(row))
                transaction.exec_driver_sql(f"INSERT INTO {name} VALUES ({marks})", tuple(row))
    for _ in range(MAX_ATTEMPTS + 1):
        assert [each.attempts for each in jobs.waiting()] == [0]
    assert run_all(jobs, engine) == 1
    assert statuses(jobs.get(job_id)) == ["unchanged"]


FULL = """
from ragkv.ingest.jobs import Jobs
from ragkv.errors import StoreFull
from tests.ingest.reader import FileEngine, make_document, run_next

engine, ballast = FileEngine(Path(sys.argv[1])), Ballast(sys.argv[1])
jobs = Jobs(engine.catalog, 100_000)
job_id = jobs.submit([make_document("a", words=2000), make_document("b")])
ballast.fill()
try:
    run_next(jobs, engine)
    sys.exit("it started")
except StoreFull:
    print([document.status for document in jobs.get(job_id).documents])
ballast.drop()
try:
    run_next(jobs, engine, lambda: ballast.path.exists() or ballast.fill())
except StoreFull:
    pass  # the failure itself could not be written down either
ballast.drop()
while run_next(jobs, engine):
    pass
print([(document.status, document.error and document.error.code) for document in jobs.get(job_id).documents])
assert engine.stored() == engine.catalog.keys()
"""


def test_a_full_disk_fails_the_running_document_only(on_a_small_disk: Callable[[str], str]) -> None:
    waiting, after = on_a_small_disk(FULL).splitlines()
    assert waiting == "['queued', 'queued']"
    assert after == "[('failed', 'store_full'), ('completed', None)]"


def test_a_document_that_met_a_busy_catalogue_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    engine = FileEngine(tmp_path)
    jobs = Jobs(engine.catalog, LIMIT)
    job_id = jobs.submit([make_document("a"), make_document("b")])
    other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    with pytest.raises(StoreUnavailable, match="busy"):
        run_next(jobs, engine, lambda: other.in_transaction or other.execute("BEGIN IMMEDIATE"))
    assert statuses(jobs.get(job_id)) == ["running", "queued"]
    other.close()
    assert run_all(jobs, engine) == 2
    assert statuses(jobs.get(job_id)) == ["completed", "completed"]
    engine.close()


def test_a_damaged_catalogue_stops_the_queue(tmp_path: Path, jobs: Jobs, engine: FileEngine) -> None:
    ingest(engine, make_document("b"))
    jobs.submit([make_document("a")])
    with engine.catalog.write() as connection:
        connection.exec_driver_sql("DELETE FROM vectors")
    with pytest.raises(CatalogCorrupt, match="ragkv reindex"):
        run_next(jobs, FileEngine(tmp_path))


def test_the_index_is_saved_when_a_job_is_done(tmp_path: Path, jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit([make_document("a")])
    run_all(jobs, engine)
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_documents_come_out_of_the_table_as_they_went_in(jobs: Jobs, engine: FileEngine) -> None:
    document = replace(make_document("ü/1"), title="Título", metadata={"a": [1, {"b": None}], "c": "\u2028"})
    document = replace(document, file=b"%PDF-\x00\xff")
    jobs.submit([document])
    run_all(jobs, engine)
    assert engine.catalog.with_file("default", "ü/1")[1] == document
