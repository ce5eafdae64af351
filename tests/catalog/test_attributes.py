"""Filters: a document is described by one exactly when its metadata says so, in every search, whatever came before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragkv.catalog import Catalog, Changes
from ragkv.errors import InputError
from ragkv.retrieval import Retrieval, Retriever
from ragkv.retrieval.index import VectorIndex
from ragkv.types import Chunk, Document, Filter, Key
from tests.ingest.reader import WordEmbedder

# Few values, and all that a careless comparison takes for one another.
VALUES = st.sampled_from(
    ["", "a", "A", "1", "true", "null", 'q"\\', "ü\u2028", 0, 1, 1.0, 2.5, -1, 10**30, True, False, None]
)
KEYS = st.sampled_from(["k", "kind", "", "a.b", 'q"', "ü", "$"])
METADATA = st.dictionaries(
    KEYS, VALUES | st.lists(VALUES, max_size=3) | st.just({"k": 1}) | st.just([{"k": 1}, ["a"]]), max_size=4
)
FILTERS = st.dictionaries(KEYS, VALUES | st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=2)


def equal(one: Any, other: Any) -> bool:
    """As JSON: true is no number, and 1 is 1.0."""
    kinds = ["number" if type(each) in (int, float) else type(each).__name__ for each in (one, other)]
    return kinds[0] == kinds[1] and bool(one == other)


def holds(wanted: Filter, metadata: Mapping[str, Any]) -> bool:
    """What a filter means, the plain way."""
    for key, values in wanted.items():
        if key not in metadata:
            return False
        says = metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
        any_of = values if isinstance(values, list) else [values]
        scalars = [each for each in says if not isinstance(each, list | dict)]
        if not any(equal(each, value) for each in scalars for value in any_of):
            return False
    return True


def put(catalog: Catalog, number: int, metadata: Mapping[str, Any], *texts: str, collection: str = "default") -> None:
    name, embedder = f"d{number}", WordEmbedder()
    chunks = [Chunk(f"{name}#{i}", name, i, "", text, (number, i)) for i, text in enumerate(texts)]
    document = Document(name, "", " ".join(texts), metadata, collection)
    keys = [Key(f"{number} {text}") for text in texts]
    catalog.put_document(document, "hash", chunks, embedder.encode(texts), keys, embedder.identity)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attributes")


@settings(max_examples=60, deadline=None)
@given(first=st.lists(METADATA, min_size=1, max_size=6), second=st.lists(METADATA, max_size=3), wanted=FILTERS)
def test_a_filter_describes_what_its_words_say_through_every_change(
    folder: Path, first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], wanted: dict[str, Any]
) -> None:
    catalog = Catalog.open(folder / "catalog.sqlite")
    for info in catalog.documents():
        catalog.remove(info.collection, info.id)
    for number, metadata in enumerate(first):
        put(catalog, number, metadata, "boat", "mast")
        put(catalog, number, metadata, "boat", collection="theirs")
    for number, metadata in enumerate(second):
        put(catalog, number, metadata, "boat", "sail")
    catalog.remove("default", "d0")
    left = catalog.documents("default")
    expected = [info.id for info in left if holds(wanted, info.metadata)]
    assert [info.id for info in catalog.page("default", "", 100, wanted)] == expected
    generation, rows = catalog.among("default", wanted)
    assert generation == catalog.generation("default")
    chunks = catalog.chunks("default", rows)
    assert sorted(chunk.id for chunk in chunks.values()) == [f"{name}#{i}" for name in expected for i in (0, 1)]
    assert sorted(chunks) == rows.tolist()
    named = catalog.chunks("default", [row for row, _ in catalog.match("default", "boat", 100, wanted)])
    assert sorted(chunk.id for chunk in named.values()) == [f"{name}#0" for name in expected]
    catalog.close()


def test_a_catalogue_from_before_filters_knows_the_attributes_of_its_documents(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    put(catalog, 1, {"kind": ["a", "b"], "year": 2024}, "boat")
    put(catalog, 2, {"kind": "c"}, "boat")
    with catalog.write() as connection:
        for event in ("insert", "update", "delete"):
            connection.execute(f"DROP TRIGGER attributes_{event}")
        connection.execute("DROP TABLE attributes")
    catalog.close()
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    put(catalog, 3, {"kind": "b"}, "boat")
    assert [info.id for info in catalog.page("default", "", 9, {"kind": "b"})] == ["d1", "d3"]
    assert [info.id for info in catalog.page("default", "d1", 9, {"kind": ["b", "c"]})] == ["d2", "d3"]
    catalog.close()


@pytest.mark.parametrize(
    "wanted",
    [{"a": {"b": 1}}, {"a": []}, {"a": [["b"]]}, {"a": float("nan")}, {"a": [0] * 65}, {str(n): n for n in range(17)}],
)
def test_what_is_no_filter_is_refused(tmp_path: Path, wanted: Any) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    with pytest.raises(InputError, match="filter"):
        catalog.page("default", "", 1, wanted)
    catalog.close()


# Inside the search: what does not fit takes no place of what does


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 90), removed=st.integers(0, 12), allowed=st.integers(0, 90), seed=st.integers(0, 2**32 - 1))
def test_a_search_among_rows_is_exact_in_a_flat_index_and_in_a_graph(
    count: int, removed: int, allowed: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 8), dtype=np.float32)
    index = VectorIndex(8, flat_limit=40)
    index.apply(Changes(1, np.empty(0, np.int64), np.arange(count), vectors))
    gone = np.sort(rng.permutation(count)[:removed]).astype(np.int64)
    index.apply(Changes(2, gone, np.empty(0, np.int64), np.empty((0, 8), np.float32)))
    rows = np.sort(rng.permutation(100)[:allowed]).astype(np.int64)  # some of them the index never had
    question: NDArray[np.float32] = rng.standard_normal(8, dtype=np.float32)
    among = [int(row) for row in rows if row < count and row not in gone]
    ranked = sorted(among, key=lambda row: -float(vectors[row] @ question))
    assert index.search_among(rows, question, 5) == ranked[:5]
    assert index.search_among(rows, question, 1000) == ranked


@pytest.mark.parametrize("flat_limit", [20, 1000])
def test_the_best_of_what_fits_is_found_behind_any_number_that_does_not(tmp_path: Path, flat_limit: int) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    for number in range(60):
        put(catalog, number, {"kind": "loud"}, "the boat is red", "the boat is red again")
    put(catalog, 60, {"kind": "quiet", "year": 1931}, "a boat that was painted green")
    put(catalog, 61, {"kind": "quiet", "year": 1889}, "the harbour")
    retriever = Retriever(catalog, WordEmbedder(), tmp_path / "index", Retrieval(flat_limit=flat_limit))

    def found(wanted: Filter | None) -> set[str]:
        early: list[Chunk] = []
        hits = retriever.search("the boat is red", "default", 3, early.extend, wanted)
        assert wanted is None or {chunk.document_id for chunk in early} <= {"d60", "d61"}
        return {hit.chunk.document_id for hit in hits}

    assert not found(None) & {"d60", "d61"}
    assert found({"kind": "quiet"}) == {"d60", "d61"}
    assert found({"kind": ["quiet", "loud"], "year": 1931.0}) == {"d60"}
    assert found({"kind": "none"}) == set()
    catalog.remove("default", "d60")
    assert found({"kind": "quiet"}) == {"d61"}
    catalog.close()
