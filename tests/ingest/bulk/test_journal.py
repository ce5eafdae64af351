"""The journal of a bulk ingest: what a worker learns of documents that another one began with."""

from __future__ import annotations

from ragkv.ingest.bulk.journal import BulkOutcome, IngestJournal, JournalEntry


def test_a_document_that_was_begun_has_an_attempt_more_each_time() -> None:
    journal = IngestJournal()
    journal.attempt(["a", "b"])
    journal.attempt(["b"])
    assert journal.entries(["a", "b", "c"]) == [JournalEntry(1), JournalEntry(2), JournalEntry()]


def test_an_outcome_stays() -> None:
    journal, done = IngestJournal(), BulkOutcome("a", "added", 1, 57)
    journal.attempt(["a"])
    journal.end(done, worker=1, encoded=1)
    journal.attempt(["a"])
    assert journal.entries(["a"]) == [JournalEntry(2, done)]


def test_the_encodings_of_a_dead_worker_count() -> None:
    journal = IngestJournal()
    for worker, encoded in ((1, 5), (2, 3), (1, 9), (3, 4)):
        journal.end(BulkOutcome("a", "added"), worker, encoded)
    assert journal.workers() == {1: 9, 2: 3, 3: 4}


def test_starts_are_counted_from_the_last_document_that_was_done() -> None:
    journal = IngestJournal()
    assert [journal.start(worker) for worker in (7, 8, 9)] == [1, 2, 3]
    journal.end(BulkOutcome("a", "added"), worker=1, encoded=0)
    assert journal.start(7) == 1


def test_a_notice_of_several_workers_is_kept_once() -> None:
    journal = IngestJournal()
    for line in ("one", "two", "one"):
        journal.notice(line)
    assert journal.notices() == ["one", "two"]


def test_a_worker_that_dies_before_a_document_is_done_is_counted():
    journal = IngestJournal()
    journal.start(7)
    journal.start(8)
    journal.end(BulkOutcome("d", "added"), 8, 5)
    assert journal.workers() == {7: 0, 8: 5}
