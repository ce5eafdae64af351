"""Ingest: nothing happens twice, a version is there whole or not at all, and KV without a chunk does not stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingest.pipeline import Paused, Stage, content_hash, ingest, ingest_steps, reindex, remove
from ragkv.errors import EmbedderChanged, InvalidDocument, NotFound
from ragkv.types import Document
from tests.ingest.reader import FileReader, WordEmbedder, make_document


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[FileReader]:
    opened = FileReader(tmp_path)
    yield opened
    opened.close()


def state(reader: FileReader) -> tuple[object, ...]:
    catalog = reader.catalog
    documents = catalog.documents()
    chunks = [catalog.chunks_of(d.collection, d.id) for d in documents]
    return documents, chunks, catalog.generation("default"), reader.stored()


def texts(reader: FileReader, document_id: str = "a") -> str:
    return " ".join(chunk.text for chunk in reader.catalog.chunks_of("default", document_id))


def stop_at(stage: Stage, at: int, error: Exception) -> Callable[[Stage, int, int], None]:
    def progress(now: Stage, done: int, total: int) -> None:
        if (now, done) == (stage, at):
            raise error

    return progress


def test_a_document_becomes_answerable(reader: FileReader) -> None:
    document = make_document("a")
    outcome = ingest(reader, document)
    assert (outcome.status, outcome.chunks) == ("added", len(reader.catalog.chunks_of("default", "a")))
    assert outcome.chunks > 3
    assert outcome.tokens == reader.catalog.document("default", "a").tokens
    assert texts(reader) == document.text
    assert reader.catalog.original("default", "a") == document
    assert reader.stored() == reader.catalog.keys()
    best = reader.retriever.search(reader.catalog.chunks_of("default", "a")[2].text)[0]
    assert best.chunk.id == "a#2"


def test_ingesting_the_same_again_does_nothing(reader: FileReader) -> None:
    first = ingest(reader, make_document("a"))
    before, encoded, stages = state(reader), reader.encoded, []
    again = ingest(reader, make_document("a"), lambda stage, done, total: stages.append(stage))
    assert again == replace(first, status="unchanged")
    assert (state(reader), reader.encoded, stages) == (before, encoded, [])


@pytest.mark.parametrize(
    "change",
    [{"title": "Another title"}, {"text": "Another text."}, {"metadata": {"year": 2000}}],
    ids=["title", "text", "metadata"],
)
def test_any_new_content_replaces_the_version(reader: FileReader, change: dict[str, object]) -> None:
    ingest(reader, make_document("a"))
    changed = replace(make_document("a"), **change)  # type: ignore[arg-type]
    assert ingest(reader, changed).status == "replaced"
    assert reader.catalog.original("default", "a") == changed
    assert reader.stored() == reader.catalog.keys(), "KV of the old version must be gone"


def test_order_of_metadata_is_no_change() -> None:
    one, two = {"a": 1, "b": [2]}, {"b": [2], "a": 1}
    assert content_hash(Document("x", "t", "x", one)) == content_hash(Document("x", "t", "x", two))
    assert content_hash(Document("x", "t", "x", one)) != content_hash(Document("x", "t", "x", {"a": 1}))


@pytest.mark.parametrize("change", [{"fingerprint": "other model"}, {"chunk_tokens": 40}], ids=["model", "chunk size"])
def test_another_reader_reads_again(reader: FileReader, change: dict[str, object]) -> None:
    ingest(reader, make_document("a"))
    old = reader.stored()
    for name, value in change.items():
        setattr(reader, name, value)
    assert ingest(reader, make_document("a")).status == "replaced"
    assert reader.stored() == reader.catalog.keys()
    assert not reader.stored() & old


def test_text_that_stays_is_not_encoded_again(reader: FileReader) -> None:
    ingest(reader, make_document("a"))
    encoded = reader.encoded
    ingest(reader, replace(make_document("a"), metadata={"year": 2000}))
    assert reader.encoded == encoded
    assert reader.stored() == reader.catalog.keys()


def test_removing_a_document_removes_what_only_it_needed(reader: FileReader) -> None:
    ingest(reader, replace(make_document("a"), title="Same"))
    ingest(reader, replace(make_document("a"), title="Same", id="b"))
    remove(reader, "default", "a")
    assert reader.stored() == reader.catalog.keys() != set()
    assert {hit.chunk.document_id for hit in reader.retriever.search("word1 word2")} == {"b"}
    remove(reader, "default", "b")
    assert reader.stored() == set()
    assert reader.retriever.search("word1 word2") == []
    with pytest.raises(NotFound):
        remove(reader, "default", "b")


def test_progress_is_told_stage_by_stage(reader: FileReader) -> None:
    seen: list[tuple[str, int, int]] = []
    outcome = ingest(reader, make_document("a"), lambda *step: seen.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["split", "embed", "encode", "commit", "index"]
    assert [step for step in seen if step[0] == "encode"] == [
        ("encode", n, outcome.chunks) for n in range(outcome.chunks)
    ]
    assert all(0 <= done <= total for _, done, total in seen)


@pytest.mark.parametrize(
    ("stage", "at"), [("split", 1999), ("embed", 0), ("encode", 0), ("encode", 3), ("commit", None)]
)
def test_work_that_is_stopped_leaves_the_old_version_and_no_orphans(
    reader: FileReader, stage: Stage, at: int | None
) -> None:
    ingest(reader, make_document("a"))
    new = make_document("a", words=400, seed=1)
    before = state(reader)
    where = {"split": len(new.text), "commit": None}.get(stage, at)

    class Stop(Exception):
        pass

    def progress(now: Stage, done: int, total: int) -> None:
        if now == stage and where in (None, done):
            raise Stop

    with pytest.raises(Stop):
        ingest(reader, new, progress)
    assert state(reader) == before


def test_work_that_is_paused_keeps_what_it_encoded(reader: FileReader) -> None:
    with pytest.raises(Paused):
        ingest(reader, make_document("a"), stop_at("encode", 3, Paused()))
    assert len(reader.stored()) == 3
    assert reader.catalog.documents() == []
    outcome = ingest(reader, make_document("a"))
    assert reader.encoded == outcome.chunks, "nothing is encoded twice"
    assert reader.stored() == reader.catalog.keys()


@pytest.mark.parametrize("stage", ["split", "embed", "encode", "commit"])
def test_steps_that_are_closed_keep_what_they_encoded_and_the_old_version(reader: FileReader, stage: Stage) -> None:
    outcome = ingest(reader, make_document("a"))
    documents, old = reader.catalog.documents(), reader.stored()
    steps = ingest_steps(reader, make_document("a", seed=1))
    next(step for step in steps if step.stage == stage)
    encoded = reader.encoded - outcome.chunks
    steps.close()
    assert reader.catalog.documents() == documents
    assert len(reader.stored() - old) == encoded
    assert ingest(reader, make_document("a", seed=1)).status == "replaced"
    assert reader.stored() == reader.catalog.keys()


def test_an_empty_document_is_invalid(reader: FileReader) -> None:
    with pytest.raises(InvalidDocument):
        ingest(reader, Document("a", "t", " \n "))
    assert reader.catalog.documents() == []


# Reindex


def test_another_embedder_is_refused_until_reindex(reader: FileReader) -> None:
    for name in "ab":
        ingest(reader, make_document(name, seed=ord(name)))
    encoded, stored = reader.encoded, reader.stored()
    reader.retriever.embedder = WordEmbedder("other", 16)
    for attempt in (lambda: ingest(reader, make_document("c")), lambda: reader.retriever.search("word1")):
        with pytest.raises(EmbedderChanged, match="ragkv reindex"):
            attempt()
    done = reindex(reader)
    assert (done.embedded, done.reread) == (reader.catalog.count()[1], 0)
    assert reader.catalog.vectors("default")[1].shape == (done.embedded, 16)
    assert reader.retriever.search(reader.catalog.chunks_of("default", "b")[1].text)[0].chunk.id == "b#1"
    assert (reader.encoded, reader.stored()) == (encoded, stored), "the language model has nothing to do with it"
    assert ingest(reader, make_document("c")).status == "added"


def test_reindex_reads_again_what_another_model_read(reader: FileReader) -> None:
    ingest(reader, make_document("a"))
    reader.fingerprint = "other model"
    ingest(reader, make_document("b", seed=1))
    assert reindex(reader).reread == 1
    assert {d.reader for d in reader.catalog.documents()} == {"other model/64"}
    assert reader.stored() == reader.catalog.keys()
    assert reindex(reader).reread == 0


def test_reindex_mends_lost_vectors_and_words(reader: FileReader) -> None:
    ingest(reader, make_document("a"))
    rows, vectors = reader.catalog.vectors("default")
    with reader.catalog.write() as connection:
        connection.execute("DELETE FROM vectors")
        connection.execute("INSERT INTO chunk_words (chunk_words) VALUES ('delete-all')")
    reindex(reader)
    again, restored = reader.catalog.vectors("default")
    assert again.tolist() == rows.tolist()
    np.testing.assert_array_equal(restored, vectors)
    assert len(reader.catalog.match("default", "title", 100)) == len(rows)


def test_reindex_of_nothing_is_nothing(reader: FileReader) -> None:
    assert reindex(reader).embedded == 0


# Faults


FULL = """
from ingest.pipeline import ingest
from ragkv.errors import StoreFull
from tests.ingest.reader import FileReader, make_document

reader, ballast = FileReader(Path(sys.argv[1])), Ballast(sys.argv[1])
ingest(reader, make_document("a"))
before = reader.catalog.documents(), reader.stored()
ballast.fill(leaving=120_000)
try:
    ingest(reader, make_document("a", words=6000, seed=1))
    sys.exit("it fitted")
except StoreFull as error:
    print(error)
assert (reader.catalog.documents(), reader.stored()) == before
ballast.drop()
assert ingest(reader, make_document("a", words=6000, seed=1)).status == "replaced"
assert reader.stored() == reader.catalog.keys()
print("recovered")
"""


def test_a_full_disk_keeps_the_old_version_and_passes(on_a_small_disk: Callable[[str], str]) -> None:
    printed = on_a_small_disk(FULL)
    assert "no space left" in printed
    assert "recovered" in printed
