"""Ingest: nothing is done twice, a version is stored whole or not at all, and KV without a chunk is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragkv.errors import EmbedderChanged, InvalidDocument, NotFound
from ragkv.ingest.pipeline import Paused, Stage, content_hash, ingest, ingest_steps, reindex, remove
from ragkv.types import Document
from tests.ingest.reader import FileEngine, WordEmbedder, make_document


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path)
    yield opened
    opened.close()


def state(engine: FileEngine) -> tuple[object, ...]:
    catalog = engine.catalog
    documents = catalog.documents()
    chunks = [catalog.chunks_of(d.collection, d.id) for d in documents]
    return documents, chunks, catalog.generation("default"), engine.stored()


def texts(engine: FileEngine, document_id: str = "a") -> str:
    return " ".join(chunk.text for chunk in engine.catalog.chunks_of("default", document_id))


def stop_at(stage: Stage, at: int, error: Exception) -> Callable[[Stage, int, int], None]:
    def progress(now: Stage, done: int, total: int) -> None:
        if (now, done) == (stage, at):
            raise error

    return progress


def test_a_document_becomes_answerable(engine: FileEngine) -> None:
    document = make_document("a")
    outcome = ingest(engine, document)
    assert (outcome.status, outcome.chunks) == ("added", len(engine.catalog.chunks_of("default", "a")))
    assert outcome.chunks > 3
    assert outcome.tokens == engine.catalog.document("default", "a").tokens
    assert texts(engine) == document.text
    assert engine.catalog.original("default", "a") == document
    assert engine.stored() == engine.catalog.keys()
    best = engine.retriever.search(engine.catalog.chunks_of("default", "a")[2].text)[0]
    assert best.chunk.id == "a#2"


def test_ingesting_the_same_again_does_nothing(engine: FileEngine) -> None:
    first = ingest(engine, make_document("a"))
    before, encoded, stages = state(engine), engine.encoded, []
    again = ingest(engine, make_document("a"), lambda stage, done, total: stages.append(stage))
    assert again == replace(first, status="unchanged")
    assert (state(engine), engine.encoded, stages) == (before, encoded, [])


def test_what_two_processes_ingest_at_the_same_time_is_stored_once(engine: FileEngine, tmp_path: Path) -> None:
    other, document = FileEngine(tmp_path), make_document("a")
    slow = ingest_steps(engine, document)
    while next(slow).stage != "commit":
        pass
    first = ingest(other, document)
    before = state(engine)
    with pytest.raises(StopIteration) as end:
        next(slow)
    other.close()
    assert first.status == "added"
    assert end.value.value == replace(first, status="unchanged")
    assert state(engine) == before, "its KV is kept, too"
    assert engine.catalog.document("default", "a").version == 1
    with engine.catalog.removing(engine.catalog.keys()) as free:
        assert not free
    remove(engine, "default", "a")
    assert engine.stored() == set(), "no claim is left"


def test_of_two_versions_at_the_same_time_the_later_one_stays(engine: FileEngine, tmp_path: Path) -> None:
    other = FileEngine(tmp_path)
    slow = ingest_steps(engine, make_document("a", seed=1))
    while next(slow).stage != "commit":
        pass
    ingest(other, make_document("a", seed=2))
    for _ in slow:
        pass
    other.close()
    assert engine.catalog.original("default", "a") == make_document("a", seed=1)
    assert engine.stored() == engine.catalog.keys()


@pytest.mark.parametrize(
    "change",
    [{"title": "Another title"}, {"text": "Another text."}, {"metadata": {"year": 2000}}],
    ids=["title", "text", "metadata"],
)
def test_any_new_content_replaces_the_version(engine: FileEngine, change: dict[str, object]) -> None:
    ingest(engine, make_document("a"))
    changed = replace(make_document("a"), **change)  # type: ignore[arg-type]
    assert ingest(engine, changed).status == "replaced"
    assert engine.catalog.original("default", "a") == changed
    assert engine.stored() == engine.catalog.keys(), "KV of the old version must be evicted"


def test_order_of_metadata_is_no_change() -> None:
    one, two = {"a": 1, "b": [2]}, {"b": [2], "a": 1}
    assert content_hash(Document("x", "t", "x", one)) == content_hash(Document("x", "t", "x", two))
    assert content_hash(Document("x", "t", "x", one)) != content_hash(Document("x", "t", "x", {"a": 1}))


@pytest.mark.parametrize("change", [{"fingerprint": "other model"}, {"chunk_tokens": 40}], ids=["model", "chunk size"])
def test_another_model_or_chunk_size_ingests_again(engine: FileEngine, change: dict[str, object]) -> None:
    ingest(engine, make_document("a"))
    old = engine.stored()
    for name, value in change.items():
        setattr(engine, name, value)
    assert ingest(engine, make_document("a")).status == "replaced"
    assert engine.stored() == engine.catalog.keys()
    assert not engine.stored() & old


def test_text_that_stays_is_not_encoded_again(engine: FileEngine) -> None:
    ingest(engine, make_document("a"))
    encoded = engine.encoded
    ingest(engine, replace(make_document("a"), metadata={"year": 2000}))
    assert engine.encoded == encoded
    assert engine.stored() == engine.catalog.keys()


def test_removing_a_document_evicts_what_only_it_needed(engine: FileEngine) -> None:
    ingest(engine, replace(make_document("a"), title="Same"))
    ingest(engine, replace(make_document("a"), title="Same", id="b"))
    remove(engine, "default", "a")
    assert engine.stored() == engine.catalog.keys() != set()
    assert {hit.chunk.document_id for hit in engine.retriever.search("word1 word2")} == {"b"}
    remove(engine, "default", "b")
    assert engine.stored() == set()
    assert engine.retriever.search("word1 word2") == []
    with pytest.raises(NotFound):
        remove(engine, "default", "b")


def test_progress_is_reported_stage_by_stage(engine: FileEngine) -> None:
    seen: list[tuple[str, int, int]] = []
    outcome = ingest(engine, make_document("a"), lambda *step: seen.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["split", "embed", "encode", "commit", "index"]
    assert [step for step in seen if step[0] == "encode"] == [
        ("encode", n, outcome.chunks) for n in range(outcome.chunks)
    ]
    assert all(0 <= done <= total for _, done, total in seen)


@pytest.mark.parametrize(
    ("stage", "at"), [("split", 1999), ("embed", 0), ("encode", 0), ("encode", 3), ("commit", None)]
)
def test_work_that_is_stopped_leaves_the_old_version_and_no_orphans(
    engine: FileEngine, stage: Stage, at: int | None
) -> None:
    ingest(engine, make_document("a"))
    new = make_document("a", words=400, seed=1)
    before = state(engine)
    where = {"split": len(new.text), "commit": None}.get(stage, at)

    class Stop(Exception):
        pass

    def progress(now: Stage, done: int, total: int) -> None:
        if now == stage and where in (None, done):
            raise Stop

    with pytest.raises(Stop):
        ingest(engine, new, progress)
    assert state(engine) == before


def test_work_that_is_paused_keeps_what_it_encoded(engine: FileEngine) -> None:
    with pytest.raises(Paused):
        ingest(engine, make_document("a"), stop_at("encode", 3, Paused()))
    assert len(engine.stored()) == 3
    assert engine.catalog.documents() == []
    outcome = ingest(engine, make_document("a"))
    assert engine.encoded == outcome.chunks, "nothing is encoded twice"
    assert engine.stored() == engine.catalog.keys()


@pytest.mark.parametrize("stage", ["split", "embed", "encode", "commit"])
def test_steps_that_are_closed_keep_what_they_encoded_and_the_old_version(engine: FileEngine, stage: Stage) -> None:
    outcome = ingest(engine, make_document("a"))
    documents, old = engine.catalog.documents(), engine.stored()
    steps = ingest_steps(engine, make_document("a", seed=1))
    next(step for step in steps if step.stage == stage)
    encoded = engine.encoded - outcome.chunks
    steps.close()
    assert engine.catalog.documents() == documents
    assert len(engine.stored() - old) == encoded
    assert ingest(engine, make_document("a", seed=1)).status == "replaced"
    assert engine.stored() == engine.catalog.keys()


def test_an_empty_document_is_invalid(engine: FileEngine) -> None:
    with pytest.raises(InvalidDocument):
        ingest(engine, Document("a", "t", " \n "))
    assert engine.catalog.documents() == []


# Reindex


def test_another_embedder_is_refused_until_reindex(engine: FileEngine) -> None:
    for name in "ab":
        ingest(engine, make_document(name, seed=ord(name)))
    encoded, stored = engine.encoded, engine.stored()
    engine.retriever.embedder = WordEmbedder("other", 16)
    with pytest.raises(EmbedderChanged, match="ragkv reindex"):
        ingest(engine, make_document("c"))
    done = reindex(engine)
    assert (done.embedded, done.reread) == (engine.catalog.count()[1], 0)
    assert engine.catalog.vectors("default")[1].shape == (done.embedded, 16)
    assert engine.retriever.search(engine.catalog.chunks_of("default", "b")[1].text)[0].chunk.id == "b#1"
    assert (engine.encoded, engine.stored()) == (encoded, stored), "the language model has nothing to do with it"
    assert ingest(engine, make_document("c")).status == "added"


def test_reindex_ingests_again_what_another_model_read(engine: FileEngine) -> None:
    ingest(engine, make_document("a"))
    engine.fingerprint = "other model"
    ingest(engine, make_document("b", seed=1))
    assert reindex(engine).reread == 1
    assert {d.reader for d in engine.catalog.documents()} == {"other model/64"}
    assert engine.stored() == engine.catalog.keys()
    assert reindex(engine).reread == 0


def test_reindex_restores_lost_vectors_and_words(engine: FileEngine) -> None:
    ingest(engine, make_document("a"))
    rows, vectors = engine.catalog.vectors("default")
    with engine.catalog.write() as connection:
        connection.exec_driver_sql("DELETE FROM vectors")
        connection.exec_driver_sql("INSERT INTO chunk_words (chunk_words) VALUES ('delete-all')")
    reindex(engine)
    again, restored = engine.catalog.vectors("default")
    assert again.tolist() == rows.tolist()
    np.testing.assert_array_equal(restored, vectors)
    assert len(engine.catalog.match("default", "title", 100)) == len(rows)


def test_reindex_of_nothing_is_nothing(engine: FileEngine) -> None:
    assert reindex(engine).embedded == 0


# Faults


FULL = """
from ragkv.ingest.pipeline import ingest
from ragkv.errors import StoreFull
from tests.ingest.reader import FileEngine, make_document

engine, ballast = FileEngine(Path(sys.argv[1])), Ballast(sys.argv[1])
ingest(engine, make_document("a"))
before = engine.catalog.documents(), engine.stored()
ballast.fill(leaving=120_000)
try:
    ingest(engine, make_document("a", words=6000, seed=1))
    sys.exit("it fitted")
except StoreFull as error:
    print(error)
assert (engine.catalog.documents(), engine.stored()) == before
ballast.drop()
assert ingest(engine, make_document("a", words=6000, seed=1)).status == "replaced"
assert engine.stored() == engine.catalog.keys()
print("recovered")
"""


def test_a_full_disk_keeps_the_old_version(on_a_small_disk: Callable[[str], str]) -> None:
    printed = on_a_small_disk(FULL)
    assert "no space left" in printed
    assert "recovered" in printed


def test_a_document_without_a_file_gets_it_although_its_content_is_unchanged(engine: FileEngine) -> None:
    document = make_document("a")
    ingest(engine, document)
    assert ingest(engine, replace(document, file=b"%PDF- late")).status == "unchanged"
    assert engine.catalog.with_file("default", "a")[1].file == b"%PDF- late"
    assert ingest(engine, document).status == "unchanged"
    assert engine.catalog.with_file("default", "a")[1].file == b"%PDF- late"
