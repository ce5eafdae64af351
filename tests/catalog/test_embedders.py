"""From one embedder to the next: vectors are kept beside each other until those of a collection are complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ragkv.catalog import Catalog, DocumentVersion, EmbedderIdentity, Reembedding
from ragkv.errors import EmbedderChanged
from ragkv.types import Chunk, Document, Key

OLD, NEW = EmbedderIdentity("old", 4, "/models/old"), EmbedderIdentity("new", 4)
NONE = np.empty(0, np.int64)


@pytest.fixture
def catalog(catalog_address: Path | str) -> Iterator[Catalog]:
    made = Catalog.open(catalog_address)
    put(made, "a", ["one", "two"])
    put(made, "b", ["three"], "other")
    yield made
    made.close()


def put(
    catalog: Catalog, id: str, texts: Sequence[str], collection: str = "default", by: EmbedderIdentity = OLD
) -> None:
    chunks = [Chunk(f"{id}#{n}", id, n, "", text, (1, 2)) for n, text in enumerate(texts)]
    keys = [Key(f"{collection} {id} {n}") for n in range(len(texts))]
    document = Document(id, "", " ".join(texts), {}, collection)
    catalog.put_document(DocumentVersion(document, " ".join(texts), chunks, vectors(by, len(texts)), keys, by))


def vectors(by: EmbedderIdentity, count: int) -> np.ndarray:
    return np.full((count, by.dimension), 0.25 if by == OLD else 0.75, np.float32)


def searched(catalog: Catalog, collection: str = "default") -> tuple[int, float]:
    """How many vectors a search sees, and a number of theirs."""
    changes = catalog.changes(collection, NONE, 0)
    return len(changes.added), float(changes.vectors[0, 0]) if len(changes.added) else 0.0


def embed(catalog: Catalog, collection: str) -> None:
    rows = [each.row for each in catalog.unembedded(collection, 0, 100)]
    catalog.store_next_vectors(rows, vectors(NEW, len(rows)), NEW)


def test_a_collection_changes_when_all_its_chunks_are_embedded(catalog: Catalog) -> None:
    assert catalog.aim_embedder(NEW) == Reembedding(OLD, NEW, 0, 3)
    assert catalog.stale_collections(NEW) == ["default", "other"]
    before = catalog.generation("default")
    (first, _) = catalog.unembedded("default", 0, 10)
    catalog.store_next_vectors([first.row], vectors(NEW, 1), NEW)
    assert not catalog.swap_vectors("default", NEW)
    assert searched(catalog) == (2, 0.25)
    assert catalog.generation("default") == before
    embed(catalog, "default")
    assert catalog.reembedding() == Reembedding(OLD, NEW, 2, 3)
    assert catalog.swap_vectors("default", NEW)
    assert searched(catalog) == (2, 0.75)
    assert catalog.state("default")[0] == NEW
    assert catalog.state("other")[0] == OLD
    assert searched(catalog, "other") == (1, 0.25)
    assert catalog.generation("default") > before
    embed(catalog, "other")
    assert catalog.swap_vectors("other", NEW)
    assert (catalog.embedder(), catalog.reembedding(), catalog.stale_collections(NEW)) == (NEW, None, [])
    with pytest.raises(EmbedderChanged):
        catalog.check_embedder(OLD)


def test_another_process_goes_on_where_the_first_one_stopped(catalog: Catalog, catalog_address: Path | str) -> None:
    catalog.aim_embedder(NEW)
    rows = [each.row for each in catalog.unembedded("default", 0, 1)]
    catalog.store_next_vectors(rows, vectors(NEW, 1), NEW)
    catalog.close()
    again = Catalog.open(catalog_address)
    assert again.aim_embedder(NEW) == Reembedding(OLD, NEW, 1, 3)
    assert len(again.unembedded("default", 0, 10)) == 1
    assert again.embedder().source == "/models/old"  # type: ignore[union-attr]
    again.close()


def test_documents_that_come_meanwhile_are_embedded_once(catalog: Catalog) -> None:
    catalog.aim_embedder(NEW)
    put(catalog, "late", ["four"], by=NEW)
    put(catalog, "first", ["five"], "fresh", by=NEW)
    assert searched(catalog) == (2, 0.25), "words find it until its collection has changed"
    assert not catalog.has_words or catalog.match("default", "four", 5)
    assert searched(catalog, "fresh") == (1, 0.75), "a new collection begins with the new embedder"
    embed(catalog, "default")
    assert catalog.swap_vectors("default", NEW)
    assert searched(catalog) == (3, 0.75)
    put(catalog, "later", ["six"], by=NEW)
    assert searched(catalog) == (4, 0.75)


def test_documents_that_go_meanwhile_are_not_missed(catalog: Catalog) -> None:
    catalog.aim_embedder(NEW)
    rows = [each.row for each in catalog.unembedded("default", 0, 10)]
    catalog.remove("default", "a")
    catalog.store_next_vectors(rows, vectors(NEW, 2), NEW)
    assert catalog.stale_collections(NEW) == ["other"]
    embed(catalog, "other")
    assert catalog.swap_vectors("other", NEW)
    assert catalog.embedder() == NEW


def test_a_process_with_the_earlier_embedder_may_still_add_documents(catalog: Catalog) -> None:
    catalog.aim_embedder(NEW)
    embed(catalog, "default")
    put(catalog, "beside", ["seven"])
    assert not catalog.swap_vectors("default", NEW), "it has no new vector yet"
    embed(catalog, "default")
    assert catalog.swap_vectors("default", NEW)
    with pytest.raises(EmbedderChanged, match="ragkv serve"):
        put(catalog, "beside", ["eight"])


def test_an_embedder_that_nobody_aims_at_is_refused(catalog: Catalog) -> None:
    with pytest.raises(EmbedderChanged, match="ragkv reindex"):
        put(catalog, "x", ["nine"], by=NEW)
    with pytest.raises(EmbedderChanged):
        catalog.store_next_vectors([1], vectors(NEW, 1), NEW)
    with pytest.raises(EmbedderChanged):
        catalog.swap_vectors("default", NEW)


def test_an_embedder_that_is_set_back_ends_the_change(catalog: Catalog) -> None:
    catalog.aim_embedder(NEW)
    rows = [each.row for each in catalog.unembedded("default", 0, 1)]
    catalog.store_next_vectors(rows, vectors(NEW, 1), NEW)
    assert catalog.aim_embedder(OLD) is None
    assert catalog.aim_embedder(NEW) == Reembedding(OLD, NEW, 0, 3), "what was embedded for nothing is gone"
    embed(catalog, "default")
    catalog.swap_vectors("default", NEW)
    back = catalog.aim_embedder(OLD)
    assert back is not None
    assert catalog.stale_collections(OLD) == ["default"], "only what had changed is embedded again"


def test_reindexing_ends_a_change(catalog: Catalog) -> None:
    catalog.aim_embedder(NEW)
    rows = [passage.row for passage in catalog.passages()]
    catalog.replace_vectors(rows, vectors(NEW, 3), NEW)
    assert (catalog.embedder(), catalog.reembedding()) == (NEW, None)
    assert searched(catalog, "other") == (1, 0.75)
