"""Tenants share the engine's time, and so do the jobs of one tenant; no document overtakes its older version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.ingest.job_queue import LOOKED_AT
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.turns import MOST_OPEN, FairShares, IngestTurns
from tests.ingest.reader import FileEngine, make_document

LIMIT = 100_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def jobs(engine: FileEngine) -> Jobs:
    return Jobs(engine.catalog, LIMIT)


def submit(jobs: Jobs, collection: str, count: int = 1, words: int = 200, name: str = "d") -> str:
    made = [make_document(f"{name}{n}", words, hash((name, n)) % 2**32, collection) for n in range(count)]
    return jobs.submit(made)


def done(jobs: Jobs, job_id: str) -> bool:
    return jobs.get(job_id).finished is not None


def test_a_small_document_of_another_tenant_does_not_wait_for_sixty(jobs: Jobs, engine: FileEngine) -> None:
    many = submit(jobs, "big:default", 20, 600)
    steps, taken = IngestTurns(jobs).steps(engine), 0
    for _ in range(12):
        next(steps)
    one = submit(jobs, "small:default", words=10)
    while not done(jobs, one):
        next(steps)
        taken += 1
    assert taken < 40
    assert jobs.get(many).counts.done <= 6
    for _ in steps:
        pass
    assert done(jobs, many)


def test_jobs_of_one_tenant_take_turns_too(jobs: Jobs, engine: FileEngine) -> None:
    many, few = submit(jobs, "default", 12, 400, "long"), submit(jobs, "default", 1, 40, "short")
    for _ in IngestTurns(jobs).steps(engine):
        if done(jobs, few):
            break
    assert jobs.get(many).counts.done <= 3


def test_everything_is_ingested_once_whatever_order_it_comes_in(jobs: Jobs, engine: FileEngine) -> None:
    ids = [submit(jobs, f"{tenant}:default", 3, name=f"{tenant}{n}") for tenant in "ab" for n in range(3)]
    steps = IngestTurns(jobs).steps(engine)
    begun = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            begun = end.value
            break
    assert begun == 18
    assert all(jobs.get(each).counts.completed == 3 for each in ids)
    assert len(engine.catalog.documents()) == 18


def test_a_newer_version_waits_for_the_older_one(jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit([make_document("before", 2000), make_document("page", 400, 1)])
    newer = make_document("page", 30, 2)
    jobs.submit([newer])
    for _ in IngestTurns(jobs).steps(engine):
        pass
    assert engine.catalog.original("default", "page").text == newer.text


def test_few_documents_of_a_tenant_are_open_at_the_same_time(jobs: Jobs, engine: FileEngine) -> None:
    for n in range(3 * MOST_OPEN):
        submit(jobs, "a:default", name=f"a{n}")
    submit(jobs, "b:default", name="b")
    turns, most = IngestTurns(jobs), 0
    for _ in turns.steps(engine):
        running = [each for each in jobs.recent() if each.status == "running"]
        most = max(most, sum(each.collection.startswith("a:") for each in running))
    assert most == MOST_OPEN


def test_more_jobs_than_are_looked_at_are_all_done(jobs: Jobs, engine: FileEngine) -> None:
    ids = [submit(jobs, "default", words=10, name=f"n{n}") for n in range(LOOKED_AT + 5)]
    for _ in IngestTurns(jobs).steps(engine):
        pass
    assert all(done(jobs, each) for each in ids)


def test_what_was_open_when_a_process_died_is_read_alone(jobs: Jobs, engine: FileEngine) -> None:
    """Otherwise the documents beside one that kills the process would be blamed for it."""
    fresh = [submit(jobs, f"{tenant}:default", name=tenant) for tenant in "de"]
    ids = [submit(jobs, f"{tenant}:default", name=tenant) for tenant in "abc"]
    with engine.catalog.write() as connection:  # as `recover` finds it after a death
        connection.exec_driver_sql(
            "UPDATE job_documents SET attempts = 1, status = 'running' WHERE id IN ('a0', 'b0', 'c0')"
        )
    assert jobs.recover() == 3
    beside = 0
    for _ in IngestTurns(jobs).steps(engine):
        running = [each for each in (*ids, *fresh) if jobs.get(each).documents[0].status == "running"]
        assert len(running) == 1 or not set(running) & set(ids)
        beside += len(running) == 2
    assert beside, "the others take turns"
    assert all(jobs.get(each).status == "completed" for each in (*ids, *fresh))


def test_a_document_that_left_the_queue_ends_its_turn(jobs: Jobs, engine: FileEngine) -> None:
    kept, dropped = submit(jobs, "a:default", name="a"), submit(jobs, "b:default", name="b")
    steps = IngestTurns(jobs).steps(engine)
    next(steps)
    jobs.cancel(dropped)
    for _ in steps:
        pass
    assert (jobs.get(kept).status, jobs.get(dropped).status) == ("completed", "cancelled")


def test_a_closed_round_puts_back_every_open_document(jobs: Jobs, engine: FileEngine) -> None:
    ids = [submit(jobs, f"{tenant}:default", name=tenant) for tenant in "ab"]
    steps = IngestTurns(jobs).steps(engine)
    while sum(jobs.get(each).status == "running" for each in ids) < 2:
        next(steps)
    steps.close()
    assert [jobs.get(each).status for each in ids] == ["queued", "queued"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 5)), min_size=30, max_size=80))
def test_sharers_that_always_want_get_the_same(costs: list[tuple[str, float]]) -> None:
    shares, had, wanted = FairShares[str](), dict.fromkeys("abc", 0.0), ["a", "b", "c"]
    for _, seconds in costs:
        first = shares.first(wanted)
        shares.charge(first, seconds, wanted)
        had[first] += seconds
    assert max(had.values()) - min(had.values()) <= 5


def test_newcomers_without_end_keep_nobody_waiting_without_end() -> None:
    shares, waited = FairShares[object](), 0
    old = "old"
    shares.first([old])
    shares.charge(old, 10.0, [old, "other"])
    while True:
        new = object()
        if shares.first([old, new]) == old:
            break
        shares.charge(new, 1.0, [old, new])
        waited += 1
        assert waited < 30


def test_who_comes_back_has_saved_nothing() -> None:
    shares = FairShares[str]()
    shares.first(["a"])
    shares.charge("a", 1.0, ["a"])
    for _ in range(10):
        shares.first(["b"])
        shares.charge("b", 10.0, ["b"])
    turns = []
    for _ in range(6):
        turns.append(shares.first(["b", "a"]))
        shares.charge(turns[-1], 10.0, ["a", "b"])
    assert turns.count("a") == 3
