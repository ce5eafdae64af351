"""Jobs: the table is the truth, one bad document stops no other, and no crash loses or repeats work without end."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingest import job_table, job_view
from ingest.job_table import MAX_ATTEMPTS
from ingest.jobs import Backlog, Counts, IngestJob, Jobs
from ingest.loader import Rejected, read
from ingest.pipeline import ingest, remove
from ragkv.catalog import database
from ragkv.errors import CatalogCorrupt, InputError, InvalidDocument, NotFound, StoreUnavailable
from ragkv.types import Chunk, Document, Key
from tests.ingest.reader import FileReader, make_document, run_next

LIMIT = 100_000


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[FileReader]:
    opened = FileReader(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def jobs(reader: FileReader) -> Jobs:
    return Jobs(reader.catalog, LIMIT)


def run_all(jobs: Jobs, reader: FileReader) -> int:
    count = 0
    while run_next(jobs, reader):
        count += 1
    return count


def statuses(job: IngestJob) -> list[str]:
    return [document.status for document in job.documents]


def ids(reader: FileReader) -> list[str]:
    return [document.id for document in reader.catalog.documents()]


def test_a_job_goes_from_queued_to_completed(jobs: Jobs, reader: FileReader) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b", seed=1)])
    job = jobs.get(job_id)
    assert (job.status, statuses(job), job.started, job.finished) == ("queued", ["queued"] * 2, None, None)
    assert ids(reader) == []
    assert run_next(jobs, reader) == job_id
    assert (jobs.get(job_id).status, statuses(jobs.get(job_id))) == ("running", ["completed", "queued"])
    assert run_next(jobs, reader) == job_id
    job = jobs.get(job_id)
    assert (job.status, statuses(job), job.error) == ("completed", ["completed"] * 2, None)
    assert job.created <= (job.started or 0) <= (job.finished or 0)
    assert run_next(jobs, reader) is None
    assert ids(reader) == ["a", "b"]


def test_jobs_run_in_the_order_they_came(jobs: Jobs, reader: FileReader) -> None:
    order = [jobs.submit([make_document(name)]) for name in "cab"]
    assert [run_next(jobs, reader) for _ in order] == order
    assert [job.id for job in jobs.recent()] == order[::-1]


def test_the_backlog_counts_what_waits_and_nothing_that_is_done(jobs: Jobs, reader: FileReader) -> None:
    assert jobs.backlog() == Backlog(documents=0, queued=0, running=0)
    jobs.submit([make_document("a"), make_document("b", seed=1), Rejected("c", InvalidDocument("c"))])
    jobs.submit([make_document("d", seed=2)])
    assert jobs.backlog() == Backlog(documents=3, queued=2, running=0)
    run_next(jobs, reader)
    assert jobs.backlog() == Backlog(documents=2, queued=1, running=1)
    run_all(jobs, reader)
    assert jobs.backlog() == Backlog(documents=0, queued=0, running=0)


def test_the_backlog_walks_no_table(reader: FileReader) -> None:
    with reader.catalog.read() as connection:
        asked: list[str] = []
        connection.set_trace_callback(asked.append)
        job_view.backlog(connection)
        connection.set_trace_callback(None)
        plans = [row[-1] for sql in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
    assert len(plans) >= 3
    assert not [plan for plan in plans if "USING" not in plan or plan.startswith("SCAN")], plans


def test_a_bad_document_fails_alone(jobs: Jobs, reader: FileReader) -> None:
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
    assert run_all(jobs, reader) == 2
    job = jobs.get(job_id)
    assert job.status == "completed"
    assert statuses(job) == ["completed", "failed", "failed", "failed", "failed", "failed", "completed"]
    assert [document.error.code for document in job.documents if document.error] == [
        "invalid_document", "invalid_document", "too_large", "invalid_document", "invalid_document",
    ]  # fmt: skip
    assert ids(reader) == ["a", "b"]


def test_a_job_of_nothing_but_bad_documents_has_failed_at_once(jobs: Jobs, reader: FileReader) -> None:
    job = jobs.get(jobs.submit([*read(b"\xff", "a.txt", LIMIT)]))
    assert (job.status, statuses(job)) == ("failed", ["failed"])
    assert job.error is not None
    assert "not UTF-8" in job.error.message
    assert job.finished
    assert run_next(jobs, reader) is None


def test_a_fault_of_ours_fails_the_document_and_the_queue_moves_on(
    jobs: Jobs, reader: FileReader, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(FileReader):
        def encode_and_store(self, chunk: Chunk, collection: str) -> Key:
            if chunk.document_id == "a":
                raise ZeroDivisionError("secret detail")
            return super().encode_and_store(chunk, collection)

    reader.__class__ = Breaking
    job_id = jobs.submit([make_document("a"), make_document("b")])
    run_all(jobs, reader)
    job = jobs.get(job_id)
    assert statuses(job) == ["failed", "completed"]
    error = job.documents[0].error
    assert error is not None
    assert error.code == "internal_error"
    assert "secret" not in error.message
    assert "secret detail" in caplog.text
    assert reader.stored() == reader.catalog.keys()


def test_a_job_needs_documents_of_one_collection(jobs: Jobs) -> None:
    for items in ([], [make_document("a"), make_document("b", collection="other")]):
        with pytest.raises(InputError, match="one collection"):
            jobs.submit(items)


def test_an_unknown_job_is_not_found(jobs: Jobs) -> None:
    for ask in (jobs.get, jobs.cancel):
        with pytest.raises(NotFound, match="no job 'x'"):
            ask("x")


def test_what_is_done_with_is_not_kept(jobs: Jobs, reader: FileReader) -> None:
    jobs.submit([make_document("a"), Document("bad", "t", "")])
    cancelled = jobs.submit([make_document("b")])
    jobs.cancel(cancelled)
    run_all(jobs, reader)
    with reader.catalog.read() as connection:
        assert connection.execute("SELECT count(*) FROM job_documents WHERE payload IS NOT NULL").fetchone() == (0,)


def test_old_jobs_are_forgotten(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "KEPT_JOBS", 2)
    waiting = jobs.submit([make_document("a")])
    failed = [jobs.submit([Document("bad", "t", " " * n)]) for n in range(4)]
    assert [job.id for job in jobs.recent()] == [failed[3], failed[2], waiting], "what still waits is never forgotten"
    with pytest.raises(NotFound):
        jobs.get(failed[0])


# Twice the same


def test_the_same_documents_waiting_twice_are_one_job(jobs: Jobs, reader: FileReader) -> None:
    first = jobs.submit([make_document("a")])
    assert jobs.submit([make_document("a")]) == first
    assert jobs.submit([make_document("a", collection="other")]) != first
    assert jobs.submit([make_document("a"), make_document("b")]) != first


def test_the_last_version_sent_wins(jobs: Jobs, reader: FileReader) -> None:
    one, two = make_document("a", seed=1), make_document("a", seed=2)
    first, second, third = (jobs.submit([version]) for version in (one, two, one))
    assert len({first, second, third}) == 3
    run_all(jobs, reader)
    assert reader.catalog.original("default", "a") == one


def test_concurrent_submissions_of_one_document_are_one_job(jobs: Jobs, reader: FileReader) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(jobs.submit([make_document("a")]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_finished_job_is_not_joined(jobs: Jobs, reader: FileReader) -> None:
    first = jobs.submit([make_document("a")])
    run_all(jobs, reader)
    assert jobs.submit([make_document("a")]) != first
    encoded = reader.encoded
    run_all(jobs, reader)
    assert reader.encoded == encoded


# Progress, cancelling, deleting, pausing


def test_progress_is_seen_while_a_document_is_read(jobs: Jobs, reader: FileReader) -> None:
    job_id, seen = jobs.submit([make_document("a")]), []
    run_next(jobs, reader, lambda: seen.append(jobs.get(job_id)))
    assert {job.status for job in seen} == {"running"}
    assert {"split", "embed", "encode"} <= {job.stage for job in seen}
    assert all(job.done <= job.total for job in seen)


def test_cancelling_stops_between_chunks_and_leaves_nothing(jobs: Jobs, reader: FileReader) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])

    def cancel_while_encoding() -> None:
        if reader.encoded == 2:
            jobs.cancel(job_id)

    assert run_next(jobs, reader, cancel_while_encoding) == job_id
    job = jobs.get(job_id)
    assert (job.status, statuses(job)) == ("cancelled", ["cancelled"] * 2)
    assert job.finished
    assert run_next(jobs, reader) is None
    assert (ids(reader), reader.stored()) == ([], set())
    assert reader.encoded == 2


def test_cancelling_keeps_what_is_in_the_catalogue(jobs: Jobs, reader: FileReader) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    run_next(jobs, reader)
    job = jobs.cancel(job_id)
    assert (job.status, statuses(job)) == ("cancelled", ["completed", "cancelled"])
    assert jobs.cancel(job_id) == job, "a finished job stays as it is"
    assert ids(reader) == ["a"]


def test_a_deleted_document_is_not_brought_back_by_a_job(jobs: Jobs, reader: FileReader) -> None:
    ingest(reader, make_document("a"))
    job_id = jobs.submit([make_document("a", seed=2), make_document("b")])
    other = jobs.submit([make_document("a", seed=3)])
    theirs = jobs.submit([make_document("a", collection="theirs")])

    def delete_while_encoding() -> None:
        if reader.catalog.find("default", "a") and jobs.get(job_id).stage == "encode":
            assert jobs.withdraw("default", "a")
            remove(reader, "default", "a")

    run_next(jobs, reader, delete_while_encoding)
    run_all(jobs, reader)
    assert statuses(jobs.get(job_id)) == ["cancelled", "completed"]
    assert jobs.get(job_id).status == "completed"
    assert jobs.get(other).status == "cancelled"
    assert jobs.get(theirs).status == "completed"
    assert [(d.collection, d.id) for d in reader.catalog.documents()] == [("default", "b"), ("theirs", "a")]
    assert reader.stored() == reader.catalog.keys()
    assert not jobs.withdraw("default", "a")


@pytest.mark.parametrize("when", ["before its transaction", "inside it"])
def test_a_document_deleted_at_the_last_moment_does_not_come_back(
    jobs: Jobs, reader: FileReader, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def delete() -> None:
        assert jobs.withdraw("default", "a")
        with contextlib.suppress(NotFound):
            remove(reader, "default", "a")

    deleting, put = threading.Thread(target=delete), reader.catalog.put_document

    def put_late(*arguments: Any) -> list[Key]:
        *others, wanted = arguments

        def asked() -> None:
            deleting.start()  # it has to wait until the transaction is over
            wanted()

        if when == "inside it":
            unreferenced = put(*others, asked)
            deleting.join()  # before the job writes down that the document is there
            return unreferenced
        deleting.start()
        deleting.join()
        return put(*arguments)

    monkeypatch.setattr(reader.catalog, "put_document", put_late)
    job_id = jobs.submit([make_document("a"), make_document("b")])
    run_next(jobs, reader)
    monkeypatch.undo()
    assert (statuses(jobs.get(job_id)), ids(reader)) == (["cancelled", "queued"], [])
    run_all(jobs, reader)
    assert (ids(reader), reader.stored()) == (["b"], reader.catalog.keys())


def test_a_collection_that_was_deleted_is_not_brought_back(jobs: Jobs, reader: FileReader) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    theirs = jobs.submit([make_document("a", collection="theirs")])
    run_next(jobs, reader)
    assert jobs.abandon("default")
    reader.evict(reader.catalog.clear("default"))
    assert not jobs.abandon("default")
    run_all(jobs, reader)
    assert (statuses(jobs.get(job_id)), jobs.get(job_id).status) == (["completed", "cancelled"], "completed")
    assert jobs.get(theirs).status == "completed"
    assert [(d.collection, d.id) for d in reader.catalog.documents()] == [("theirs", "a")]
    assert reader.stored() == reader.catalog.keys()
    with pytest.raises(NotFound, match="no collection 'default'"):
        reader.catalog.clear("default")


def test_a_document_that_is_there_as_it_is_is_unchanged(jobs: Jobs, reader: FileReader) -> None:
    jobs.submit([make_document("a")])
    run_all(jobs, reader)
    encoded = reader.encoded
    job_id = jobs.submit([make_document("a"), Document("bad", "", " ")])
    run_all(jobs, reader)
    job = jobs.get(job_id, "failed")
    assert (job.status, reader.encoded) == ("completed", encoded)
    assert job.counts == Counts(2, 2, completed=0, unchanged=1, failed=1, cancelled=0)
    assert [document.id for document in job.documents] == ["bad"]
    assert job.last_error == job.documents[0].error
    assert statuses(jobs.get(job_id)) == ["unchanged", "failed"]


def test_a_break_between_two_documents_does_not_count_as_time_they_need(jobs: Jobs, reader: FileReader) -> None:
    job_id, seen = jobs.submit([make_document(name) for name in "abc"]), list[float | None]()
    began = time.monotonic()
    run_next(jobs, reader, lambda: seen.append(jobs.get(job_id).eta_seconds))
    assert seen[0] is None, "nothing is known yet"
    took = time.monotonic() - began
    with reader.catalog.write() as connection:
        connection.execute("UPDATE jobs SET started = started - 10000, updated = updated - 10000")
    run_next(jobs, reader, lambda: seen.append(jobs.get(job_id).eta_seconds))
    assert seen[-1] is not None
    assert seen[-1] < 20 * took + 1


def test_a_pause_puts_the_document_back_with_what_is_encoded(tmp_path: Path, jobs: Jobs, reader: FileReader) -> None:
    job_id = jobs.submit([make_document("a")])
    run_next(jobs, reader, lambda: jobs.pause() if reader.encoded == 3 else None)
    job = jobs.get(job_id)
    assert (job.status, statuses(job)) == ("queued", ["queued"])
    assert run_next(jobs, reader) is None, "a paused queue starts nothing"
    assert len(reader.stored()) == 3

    later = Jobs(reader.catalog, LIMIT)
    assert later.recover() == 0
    assert run_next(later, reader) == job_id
    assert later.get(job_id).status == "completed"
    assert reader.encoded == len(reader.stored())


def test_a_closed_ingest_puts_the_document_back_with_what_is_encoded(jobs: Jobs, reader: FileReader) -> None:
    job_id = jobs.submit([make_document("a")])
    for _ in range(MAX_ATTEMPTS + 1):
        steps = jobs.steps(reader)
        for step in steps:
            if (step.stage, step.done) == ("encode", 3):
                break
        steps.close()
        job = jobs.get(job_id)
        assert (job.status, statuses(job), len(reader.stored())) == ("queued", ["queued"], 3)
    assert run_all(jobs, reader) == 1
    assert jobs.get(job_id).status == "completed"
    assert reader.encoded == len(reader.stored())


def test_the_steps_of_a_job_end_with_the_commit(jobs: Jobs, reader: FileReader) -> None:
    jobs.submit([make_document("a")])
    steps = list(jobs.steps(reader))
    assert list(dict.fromkeys(step.stage for step in steps)) == ["split", "embed", "encode", "commit"]
    assert list(jobs.steps(reader)) == []


# Crashes and full disks


WORKER = """
import sys, time
from pathlib import Path
from ingest.jobs import Jobs
from tests.ingest.reader import FileReader, run_next

class Slow(FileReader):
    def encode_and_store(self, chunk, collection):
        key = super().encode_and_store(chunk, collection)
        print(chunk.id, flush=True)
        time.sleep(0.05)
        return key

reader = Slow(Path(sys.argv[1]))
jobs = Jobs(reader.catalog, 100_000)
jobs.recover()
while run_next(jobs, reader):
    pass
"""


def test_a_killed_worker_loses_nothing_and_does_not_start_over(
    tmp_path: Path, root: Path, jobs: Jobs, reader: FileReader
) -> None:
    job_id = jobs.submit([make_document("a"), make_document("b")])
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "a#0\n"
    assert worker.stdout.readline() == "a#1\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    worker.stdout.close()
    assert jobs.get(job_id).status == "running"
    kept = reader.stored()
    assert kept
    assert Jobs(reader.catalog, LIMIT).recover() == 1
    assert jobs.get(job_id).status == "queued"
    assert run_all(jobs, reader) == 2
    assert jobs.get(job_id).status == "completed"
    assert kept <= reader.stored() == reader.catalog.keys()
    assert reader.encoded == len(reader.stored()) - len(kept)


def test_a_document_that_keeps_killing_the_process_is_given_up(
    jobs: Jobs, reader: FileReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(BaseException):
        pass

    def die(chunk: Chunk, collection: str) -> Key:
        raise Dying

    job_id = jobs.submit([make_document("a"), make_document("b")])
    monkeypatch.setattr(reader, "encode_and_store", die)
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(Dying):
            run_next(jobs, reader)
        jobs.recover()
    monkeypatch.undo()
    assert statuses(jobs.get(job_id)) == ["failed", "queued"]
    error = jobs.get(job_id).documents[0].error
    assert error is not None
    assert error.code == "interrupted"
    run_all(jobs, reader)
    assert ids(reader) == ["b"]


def test_pauses_do_not_count_as_deaths(reader: FileReader) -> None:
    job_id = Jobs(reader.catalog, LIMIT).submit([make_document("a")])
    for _ in range(MAX_ATTEMPTS + 1):
        jobs = Jobs(reader.catalog, LIMIT)
        jobs.recover()
        run_next(jobs, reader, jobs.pause)
    assert statuses(jobs.get(job_id)) == ["queued"]


FULL = """
from ingest.jobs import Jobs
from ragkv.errors import StoreFull
from tests.ingest.reader import FileReader, make_document, run_next

reader, ballast = FileReader(Path(sys.argv[1])), Ballast(sys.argv[1])
jobs = Jobs(reader.catalog, 100_000)
job_id = jobs.submit([make_document("a", words=2000), make_document("b")])
ballast.fill()
try:
    run_next(jobs, reader)
    sys.exit("it started")
except StoreFull:
    print([document.status for document in jobs.get(job_id).documents])
ballast.drop()
try:
    run_next(jobs, reader, lambda: ballast.path.exists() or ballast.fill())
except StoreFull:
    pass  # the failure itself could not be written down either
ballast.drop()
while run_next(jobs, reader):
    pass
print([(document.status, document.error and document.error.code) for document in jobs.get(job_id).documents])
assert reader.stored() == reader.catalog.keys()
"""


def test_a_full_disk_fails_what_is_being_read_and_passes(on_a_small_disk: Callable[[str], str]) -> None:
    waiting, after = on_a_small_disk(FULL).splitlines()
    assert waiting == "['queued', 'queued']"
    assert after == "[('failed', 'store_full'), ('completed', None)]"


def test_what_could_not_be_written_down_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    reader = FileReader(tmp_path)
    jobs = Jobs(reader.catalog, LIMIT)
    job_id = jobs.submit([make_document("a"), make_document("b")])
    other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    with pytest.raises(StoreUnavailable, match="busy"):
        run_next(jobs, reader, lambda: other.in_transaction or other.execute("BEGIN IMMEDIATE"))  # type: ignore[arg-type]
    assert statuses(jobs.get(job_id)) == ["running", "queued"]
    other.close()
    assert run_next(jobs, reader) == job_id
    assert statuses(jobs.get(job_id)) == ["failed", "completed"]
    reader.close()


def test_a_damaged_catalogue_stops_the_worker(tmp_path: Path, jobs: Jobs, reader: FileReader) -> None:
    ingest(reader, make_document("b"))
    jobs.submit([make_document("a")])
    with reader.catalog.write() as connection:
        connection.execute("DELETE FROM vectors")
    with pytest.raises(CatalogCorrupt, match="ragkv reindex"):
        run_next(jobs, FileReader(tmp_path))


def test_the_index_is_saved_when_a_job_is_done(tmp_path: Path, jobs: Jobs, reader: FileReader) -> None:
    jobs.submit([make_document("a")])
    run_all(jobs, reader)
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_documents_come_out_of_the_table_as_they_went_in(jobs: Jobs, reader: FileReader) -> None:
    document = replace(make_document("ü/1"), title="Título", metadata={"a": [1, {"b": None}], "c": "\u2028"})
    jobs.submit([document])
    run_all(jobs, reader)
    assert reader.catalog.original("default", "ü/1") == document
