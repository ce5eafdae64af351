"""Every chunk is embedded again, collection by collection, while searches and ingest go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.catalog import EmbedderIdentity
from ragkv.ingest.pipeline import ingest
from ragkv.ingest.reembedding import BATCH, reembed_steps
from ragkv.retrieval import Retriever, SearchScope
from tests.ingest.reader import FileEngine, WordEmbedder, make_document


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    """An engine with documents in two collections, and another embedder than theirs."""
    made = FileEngine(tmp_path)
    for number in range(3):
        ingest(made, make_document(f"d{number}", seed=number))
        ingest(made, make_document(f"e{number}", seed=number, collection="more"))
    other = WordEmbedder("other", 16)
    made.retriever = Retriever(made.catalog, other, tmp_path / "index", open_earlier=reopen)
    made.catalog.aim_embedder(other.identity)
    yield made
    made.close()


def reopen(identity: EmbedderIdentity) -> WordEmbedder:
    return WordEmbedder(identity.name, identity.dimension)


def used(engine: FileEngine, collection: str = "default") -> str:
    """The embedder that a search uses."""
    found = engine.retriever.find_passages("word1 word2", SearchScope(collection))
    assert found.passages
    assert found.report.by_vector > 0
    return found.report.embedder


def test_collections_change_one_after_another(engine: FileEngine) -> None:
    seen = list[tuple[str, str, str]]()
    for changed in reembed_steps(engine):
        seen.append((changed, used(engine), used(engine, "more")))
    changes = [each for each in seen if each[0]]
    assert changes == [("default", "other", "words"), ("more", "other", "other")]
    assert seen[0] == ("", "words", "words")
    assert engine.catalog.embedder() == WordEmbedder("other", 16).identity
    rows, vectors = engine.catalog.vectors("default")
    texts = {passage.row: f"{passage.title}\n{passage.text}" for passage in engine.catalog.passages()}
    assert vectors == pytest.approx(WordEmbedder("other", 16).encode([texts[int(row)] for row in rows]))
    assert list(reembed_steps(engine)) == []


def test_a_batch_is_not_embedded_twice(engine: FileEngine) -> None:
    steps = reembed_steps(engine)
    next(steps)
    left = sum(len(engine.catalog.unembedded(name, 0, 10_000)) for name in ("default", "more"))
    assert left == engine.catalog.count()[1] - BATCH
    list(reembed_steps(engine))
    assert engine.catalog.reembedding() is None


def test_documents_that_are_added_replaced_and_removed_meanwhile_end_in_the_index(engine: FileEngine) -> None:
    steps = reembed_steps(engine)
    next(steps)
    ingest(engine, make_document("d0", seed=50))
    ingest(engine, make_document("late", seed=60))
    engine.catalog.remove("default", "d1")
    assert used(engine) == "words"
    list(steps)
    assert used(engine) == "other"
    rows, _ = engine.catalog.vectors("default")
    documents = {chunk.document_id for chunk in engine.catalog.chunks("default", rows.tolist()).values()}
    assert documents == {"d0", "d2", "late"}
