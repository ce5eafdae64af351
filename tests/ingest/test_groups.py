"""Chunks of several documents are encoded together: what is in a group, and what a fault or a removal does to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ragkv.errors import InputError, InvalidDocument
from ragkv.ingest import job_steps, pipeline, turns
from ragkv.ingest import jobs as ingest_jobs
from ragkv.ingest.groups import ingest_all
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.outcomes import IngestOutcome
from ragkv.ingest.pipeline import EMBED_BATCH, ingest
from ragkv.ingest.progress import no_progress
from ragkv.ingest.turns import IngestTurns
from ragkv.types import Chunk, Document, Key
from tests.clock import set_clock
from tests.ingest.reader import FileEngine, make_document

GROUP = 200
SMALL = 30
"""Words of a document of one chunk."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path)
    opened.group_tokens = GROUP
    yield opened
    opened.close()


@pytest.fixture
def jobs(engine: FileEngine) -> Jobs:
    return Jobs(engine.catalog, 100_000)


def small(count: int, collection: str = "default", name: str = "d") -> list[Document]:
    return [make_document(f"{name}{n}", SMALL, n, collection) for n in range(count)]


def run(jobs: Jobs, engine: FileEngine) -> None:
    for _ in IngestTurns(jobs).steps(engine):
        pass


def documents_of(group: list[str]) -> set[str]:
    return {name.partition("#")[0] for name in group}


def test_chunks_of_a_document_are_encoded_in_groups(engine: FileEngine) -> None:
    ingest(engine, make_document("long", 600))
    chunks = engine.catalog.chunks_of("default", "long")
    sizes = {chunk.id: len(chunk.tokens) for chunk in chunks}
    assert [name for group in engine.together for name in group] == list(sizes)
    sums = [sum(sizes[name] for name in group) for group in engine.together]
    assert max(sums) <= GROUP
    assert all(one + sizes[after[0]] > GROUP for one, after in zip(sums, engine.together[1:], strict=False))


def test_a_chunk_larger_than_a_group_is_encoded_alone(engine: FileEngine) -> None:
    engine.group_tokens = 1
    ingest(engine, make_document("long", 200))
    assert [len(group) for group in engine.together] == [1] * len(engine.catalog.chunks_of("default", "long"))


def test_small_documents_of_a_job_are_encoded_together(jobs: Jobs, engine: FileEngine) -> None:
    job = jobs.submit(small(12))
    run(jobs, engine)
    assert jobs.get(job).counts.completed == 12
    assert len(engine.together) <= 4
    assert engine.encoded == 12
    assert engine.stored() == engine.catalog.keys()


def test_jobs_of_one_document_are_encoded_together(jobs: Jobs, engine: FileEngine) -> None:
    ids = [jobs.submit([document]) for document in small(12)]
    run(jobs, engine)
    assert all(jobs.get(job).status == "completed" for job in ids)
    assert len(engine.together) <= 4


def test_a_group_has_documents_of_one_tenant_only(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded, encode = list[list[str]](), engine.retriever.embedder.encode

    def recorded(texts: Sequence[str]) -> NDArray[np.float32]:
        embedded.append([text.removeprefix("Title of ") for text in texts])
        return encode(texts)

    monkeypatch.setattr(engine.retriever.embedder, "encode", recorded)
    set_clock(monkeypatch, map(float, itertools.count()).__next__, turns)  # all work takes equally long
    for tenant in "ab":  # so few that a group has room for those of both
        jobs.submit(small(3, f"{tenant}:default", tenant))
    run(jobs, engine)
    for groups in (engine.together, embedded):
        assert max(map(len, groups)) > 1
        assert all(len({name[0] for name in group}) == 1 for group in groups)


def test_a_fault_of_one_document_fails_it_alone(jobs: Jobs, engine: FileEngine) -> None:
    class Breaking(FileEngine):
        def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
            if any(chunk.document_id == "d2" for chunk, _ in chunks):
                raise ZeroDivisionError
            super().encode_and_store_all(chunks)

    engine.__class__ = Breaking
    job = jobs.get(jobs.submit(small(5)))
    run(jobs, engine)
    job = jobs.get(job.id)
    assert [each.status for each in job.documents] == ["completed", "completed", "failed", "completed", "completed"]
    assert engine.stored() == engine.catalog.keys()


def test_a_cancelled_document_of_a_group_stays_cancelled(jobs: Jobs, engine: FileEngine) -> None:
    cancelled, kept = jobs.submit(small(1, name="gone")), jobs.submit(small(3, name="kept"))
    steps = IngestTurns(jobs).steps(engine)
    while not engine.together:
        next(steps)
    assert documents_of(engine.together[0]) == {"gone0", "kept0", "kept1", "kept2"}
    jobs.cancel(cancelled)
    for _ in steps:
        pass
    assert (jobs.get(cancelled).status, jobs.get(kept).status) == ("cancelled", "completed")
    assert [each.id for each in engine.catalog.documents()] == ["kept0", "kept1", "kept2"]
    assert engine.stored() == engine.catalog.keys()


def test_a_pause_puts_back_all_documents_of_a_group_without_encoding_them(jobs: Jobs, engine: FileEngine) -> None:
    job = jobs.submit(small(4))
    turns = IngestTurns(jobs)
    for _ in turns.steps(engine):
        if sum(each.status == "running" for each in jobs.get(job).documents) == 4:
            jobs.pause()
    assert {each.status for each in jobs.get(job).documents} == {"queued"}
    assert not engine.together


def test_a_document_of_another_tenant_waits_for_one_group_at_most(jobs: Jobs, engine: FileEngine) -> None:
    jobs.submit(small(40, "big:default", "big"))
    steps = IngestTurns(jobs).steps(engine)
    while not engine.together:
        next(steps)
    one, before = jobs.submit(small(1, "small:default", "small")), len(engine.together)
    while jobs.get(one).finished is None:
        next(steps)
    assert [documents_of(group) for group in engine.together[before:]].index({"small0"}) <= 1


def test_the_pace_of_a_job_is_that_of_its_documents_one_after_another(
    jobs: Jobs, engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of a group overlap: each is open as long as the whole group."""
    now = [0.0]
    set_clock(monkeypatch, lambda: now[0], ingest_jobs, job_steps, pipeline, turns)

    class Slow(FileEngine):
        def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
            now[0] += 1.0 * len(list(chunks))
            super().encode_and_store_all(chunks)

    engine.__class__ = Slow
    jobs.submit(small(40))
    steps = IngestTurns(jobs).steps(engine)
    while jobs.recent()[0].counts.done < 20:
        next(steps)
    with engine.catalog.read() as connection:
        (seconds,) = connection.exec_driver_sql("SELECT seconds FROM paces").fetchone()
    assert seconds < 3.0, "not the five seconds of a group"


def test_documents_come_out_in_order_with_their_outcomes(engine: FileEngine) -> None:
    documents = [*small(3), Document("empty", "t", " "), make_document("long", 600), *small(2, name="e")]
    found = list(ingest_all(engine, documents, no_progress))
    assert [document.id for document, _ in found] == ["d0", "d1", "d2", "empty", "long", "e0", "e1"]
    assert [isinstance(outcome, InputError) for _, outcome in found] == [False] * 3 + [True] + [False] * 3
    assert len(engine.together[0]) > 1


def test_of_two_documents_with_one_id_the_later_one_stays(engine: FileEngine) -> None:
    one, two = make_document("page", SMALL, 1), make_document("page", SMALL, 2)
    found = [outcome for _, outcome in ingest_all(engine, [one, two], no_progress)]
    assert [each.status for each in found if isinstance(each, IngestOutcome)] == ["added", "replaced"]
    assert engine.catalog.original("default", "page").text == two.text
    assert engine.stored() == engine.catalog.keys()


def test_passages_of_several_documents_are_embedded_together(
    engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, encode = list[int](), engine.retriever.embedder.encode

    def counted(texts: Sequence[str]) -> NDArray[np.float32]:
        calls.append(len(texts))
        return encode(texts)

    monkeypatch.setattr(engine.retriever.embedder, "encode", counted)
    engine.group_tokens = 100_000
    documents = [*small(40), make_document("long", 900)]
    together = list(ingest_all(engine, documents, no_progress))
    assert [document.id for document, _ in together] == [document.id for document in documents]
    assert calls[0] == EMBED_BATCH
    assert len(calls) <= 4
    for document in (documents[0], documents[-1]):
        rows = engine.catalog.passages()
        texts = [f"{row.title}\n{row.text}" for row in rows if row.title == document.title]
        stored = engine.catalog.vectors_of(row.row for row in rows if row.title == document.title)
        assert np.allclose(np.stack(list(stored.values())), encode(texts))


def test_a_fault_while_embedding_together_is_met_by_its_document_alone(
    engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine.retriever.embedder.encode

    def picky(texts: Sequence[str]) -> NDArray[np.float32]:
        if any("of d3" in text for text in texts):
            raise InvalidDocument("d3 cannot be embedded")
        return encode(texts)

    monkeypatch.setattr(engine.retriever.embedder, "encode", picky)
    outcomes = {document.id: outcome for document, outcome in ingest_all(engine, small(6), no_progress)}
    assert isinstance(outcomes.pop("d3"), InvalidDocument)
    assert {outcome.status for outcome in outcomes.values() if isinstance(outcome, IngestOutcome)} == {"added"}
    assert len(outcomes) == 5


def test_all_that_waits_is_encoded_in_groups_however_much_was_embedded_at_once(engine: FileEngine) -> None:
    list(ingest_all(engine, small(40), no_progress))
    assert engine.encoded == 40
    assert len(engine.together) <= 14, "a group holds three or more of them"


class Writing(FileEngine):
    """Writes KV only when it is waited for, as an engine on a GPU may."""

    written: set[Key]

    def is_writing(self, keys: Iterable[Key]) -> bool:
        return not set(keys) <= self.written

    def finish_writes(self, keys: Iterable[Key]) -> None:
        self.written |= set(keys)


@pytest.fixture
def writing(engine: FileEngine, monkeypatch: pytest.MonkeyPatch) -> Writing:
    """An engine that lists the documents it commits among the groups it encodes, in `together`."""
    engine.__class__ = Writing
    assert isinstance(engine, Writing)
    engine.written, put = set(), engine.catalog.put_document

    def put_document(version, *args):
        assert set(version.keys) <= engine.written, "a document is committed when its KV is written"
        engine.together.append([version.document.id])
        return put(version, *args)

    monkeypatch.setattr(engine.catalog, "put_document", put_document)
    return engine


def test_a_group_is_encoded_before_the_one_that_is_being_written_is_committed(writing: Writing) -> None:
    documents = small(12)
    found = list(ingest_all(writing, documents, no_progress))
    assert [document.id for document, _ in found] == [document.id for document in documents]
    assert all(isinstance(outcome, IngestOutcome) for _, outcome in found), "a document is written before its commit"
    assert min(map(len, writing.together[:2])) > 1, "two groups come first"


def test_documents_of_a_job_wait_aside_while_they_are_written(writing: Writing, jobs: Jobs) -> None:
    job = jobs.submit(small(12))
    for _ in IngestTurns(jobs).steps(writing):
        pass
    assert jobs.get(job).counts.done == 12
    assert min(map(len, writing.together[:2])) > 1, "two groups come first"


def test_a_job_that_stops_while_it_is_written_is_taken_up_again(writing: Writing, jobs: Jobs) -> None:
    job = jobs.submit(small(6))
    steps = IngestTurns(jobs).steps(writing)
    while not writing.together:
        next(steps)
    jobs.pause()
    for _ in steps:
        pass
    assert jobs.get(job).counts.done == 0
    again = Jobs(writing.catalog, 100_000)
    again.recover()
    encoded = writing.encoded
    for _ in IngestTurns(again).steps(writing):
        pass
    assert again.get(job).counts.done == 6
    assert writing.encoded <= encoded + 6


def test_what_nobody_expects_ends_one_document_of_an_ingest_and_the_others_go_on(
    engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine.encode_and_store_all

    def fail(chunks: Iterable[tuple[Chunk, str]]) -> None:
        if any(chunk.document_id == "d1" for chunk, _ in chunks):
            raise type("PanicException", (BaseException,), {})
        encode(chunks)

    monkeypatch.setattr(engine, "encode_and_store_all", fail)
    outcomes = {document.id: outcome for document, outcome in ingest_all(engine, small(4), no_progress)}
    assert isinstance(outcomes.pop("d1"), InvalidDocument)
    assert list(outcomes) == ["d0", "d2", "d3"]
    assert all(isinstance(outcome, IngestOutcome) for outcome in outcomes.values())
