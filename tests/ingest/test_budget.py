"""Splitting a document has a budget of time, which its size and a setting make."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from ragkv.errors import TooLarge
from ragkv.ingest import pipeline
from ragkv.ingest.budget import within
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.pipeline import ingest, reindex
from ragkv.ingest.progress import IngestStep, run_to_end
from ragkv.types import Document
from tests.ingest.reader import FileEngine, make_document

STEP = IngestStep("split", 1, 2)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path)
    yield opened
    opened.close()


def busy(seconds: float) -> None:
    """Keep the processor busy."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def busy_steps(count: int, seconds: float) -> Generator[IngestStep, None, str]:
    for _ in range(count):
        busy(seconds)
        yield STEP
    return "split"


def test_a_document_that_takes_longer_than_its_budget_is_refused_with_the_setting() -> None:
    said = r"document 'a': splitting its text took longer than 0\.1 s of processor time \(0\.1 s for each MiB, parse_se"
    with pytest.raises(TooLarge, match=said):
        run_to_end(within(busy_steps(100, 0.02), make_document("a"), 0.1))


def test_a_larger_document_may_take_longer() -> None:
    large = Document("a", "A", "a " * 2**19 + "é" * 2**19 + "a")  # two MiB and a byte
    assert run_to_end(within(busy_steps(10, 0.02), large, 0.1)) == "split"


def test_work_between_the_steps_of_a_document_is_not_charged_to_it() -> None:
    steps = within(busy_steps(2, 0.0), make_document("a"), 0.1)
    for _ in range(2):
        assert next(steps) == STEP
        busy(0.2)
    with pytest.raises(StopIteration):
        next(steps)


def test_a_refused_document_fails_alone_and_leaves_its_old_version(engine: FileEngine) -> None:
    ingest(engine, make_document("a"))
    before = engine.catalog.original("default", "a")
    engine.split_seconds = 1e-9
    jobs = Jobs(engine.catalog, 1 << 20)
    job = jobs.submit([Document("a", "A", "Other words. " * 200)])
    run_to_end(jobs.steps(engine))
    (fault,) = (document.error for document in jobs.get(job).documents)
    assert fault is not None
    assert (fault.code, "parse_seconds" in fault.message) == ("too_large", True)
    assert engine.catalog.original("default", "a") == before


def test_a_stored_document_is_never_refused_because_another_model_reads_it(
    engine: FileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(engine, make_document("a"))
    engine.fingerprint, engine.split_seconds = "other", 1e-9
    assert reindex(engine).reread == 1
    assert engine.catalog.document("default", "a").reader == pipeline.reader_of(engine, "default")
