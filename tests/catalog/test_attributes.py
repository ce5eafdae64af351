"""Filters select exactly the documents whose metadata matches, in listings and searches, after any changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragkv.catalog import Catalog, Changes, DocumentVersion
from ragkv.errors import InputError
from ragkv.retrieval import Retrieval, Retriever
from ragkv.retrieval.index import VectorIndex
from ragkv.types import Chunk, Document, Filter, Key
from tests.ingest.reader import WordEmbedder

# Few values, chosen so that a careless comparison confuses them.
VALUES = st.sampled_from(
    [
        *("", "a", "A", "1", "true", "null", 'q"\\', "ü\u2028", 0, 1, 1.0, 2.5, -1, True, False, None),
        *(2**53, 2**53 + 1, float(2**53), 2**63 - 1, 2**63 - 2, -(2**63), 1e30),
    ]
)
KEYS = st.sampled_from(["k", "kind", "", "a.b", 'q"', "ü", "$"])
METADATA = st.dictionaries(
    KEYS, VALUES | st.lists(VALUES, max_size=3) | st.just({"k": 1}) | st.just([{"k": 1}, ["a"]]), max_size=4
)
FILTERS = st.dictionaries(KEYS, VALUES | st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=2)


def json_equal(one: Any, other: Any) -> bool:
    """Compare as JSON does: true is not a number, and 1 equals 1.0."""
    kinds = ["number" if type(each) in (int, float) else type(each).__name__ for each in (one, other)]
    return kinds[0] == kinds[1] and bool(one == other)


def matches(filter: Filter, metadata: Mapping[str, Any]) -> bool:
    """A straightforward implementation of filters, as the reference."""
    for key, values in filter.items():
        if key not in metadata:
            return False
        present = metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
        allowed = values if isinstance(values, list) else [values]
        scalars = [each for each in present if not isinstance(each, list | dict)]
        if not any(json_equal(each, value) for each in scalars for value in allowed):
            return False
    return True


def put(catalog: Catalog, number: int, metadata: Mapping[str, Any], *texts: str, collection: str = "default") -> None:
    name, embedder = f"d{number}", WordEmbedder()
    chunks = [Chunk(f"{name}#{i}", name, i, "", text, (number, i)) for i, text in enumerate(texts)]
    document = Document(name, "", " ".join(texts), metadata, collection)
    keys = [Key(f"{number} {text}") for text in texts]
    catalog.put_document(DocumentVersion(document, "hash", chunks, embedder.encode(texts), keys, embedder.identity))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(first=st.lists(METADATA, min_size=1, max_size=6), second=st.lists(METADATA, max_size=3), filter=FILTERS)
def test_a_filter_selects_the_same_documents_as_the_reference_after_any_change(
    catalog_address: Path | str,
    first: Sequence[dict[str, Any]],
    second: Sequence[dict[str, Any]],
    filter: dict[str, Any],
) -> None:
    catalog = Catalog.open(catalog_address)
    for info in catalog.documents():
        catalog.remove(info.collection, info.id)
    for number, metadata in enumerate(first):
        put(catalog, number, metadata, "boat", "mast")
        put(catalog, number, metadata, "boat", collection="theirs")
    for number, metadata in enumerate(second):
        put(catalog, number, metadata, "boat", "sail")
    catalog.remove("default", "d0")
    left = catalog.documents("default")
    expected = [info.id for info in left if matches(filter, info.metadata)]
    assert [info.id for info in catalog.page("default", None, 100, filter)] == expected
    generation, rows = catalog.filtered_rows("default", filter)
    assert generation == catalog.generation("default")
    chunks = catalog.chunks("default", rows)
    assert sorted(chunk.id for chunk in chunks.values()) == [f"{name}#{i}" for name in expected for i in (0, 1)]
    assert sorted(chunks) == rows.tolist()
    if catalog.has_words:
        named = catalog.chunks("default", [row for row, _ in catalog.match("default", "boat", 100, filter)])
        assert sorted(chunk.id for chunk in named.values()) == [f"{name}#0" for name in expected]
    catalog.close()


def test_an_old_catalogue_without_attributes_gets_them(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    put(catalog, 1, {"kind": ["a", "b"], "year": 2024}, "boat")
    put(catalog, 2, {"kind": "c"}, "boat")
    with catalog.write() as connection:
        for event in ("insert", "update", "delete"):
            connection.exec_driver_sql(f"DROP TRIGGER attributes_{event}")
        connection.exec_driver_sql("DROP TABLE attributes")
    catalog.close()
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    put(catalog, 3, {"kind": "b"}, "boat")
    assert [info.id for info in catalog.page("default", None, 9, {"kind": "b"})] == ["d1", "d3"]
    assert [info.id for info in catalog.page("default", ("d1", "d1"), 9, {"kind": ["b", "c"]})] == ["d2", "d3"]
    catalog.close()


@pytest.mark.parametrize(
    "filter",
    [
        {"a": {"b": 1}},
        {"a": []},
        {"a": [["b"]]},
        {"a": float("nan")},
        {"a": [0] * 65},
        {"a": 2**63},
        {str(n): n for n in range(17)},
    ],
)
def test_a_malformed_filter_is_refused(tmp_path: Path, filter: Any) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    with pytest.raises(InputError, match="filter"):
        catalog.page("default", None, 1, filter)
    catalog.close()


# Filters apply inside the search, so documents that do not match do not displace those that do


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 90), removed=st.integers(0, 12), allowed=st.integers(0, 90), seed=st.integers(0, 2**32 - 1))
def test_a_search_among_rows_is_exact_in_a_flat_index_and_in_a_graph(
    count: int, removed: int, allowed: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 8), dtype=np.float32)
    index = VectorIndex(8, flat_limit=40)
    index.apply(Changes(1, np.empty(0, np.int64), np.arange(count), vectors))
    removed_rows = np.sort(rng.permutation(count)[:removed]).astype(np.int64)
    index.apply(Changes(2, removed_rows, np.empty(0, np.int64), np.empty((0, 8), np.float32)))
    rows = np.sort(rng.permutation(100)[:allowed]).astype(np.int64)  # some of them are not in the index
    question: NDArray[np.float32] = rng.standard_normal(8, dtype=np.float32)
    among = [int(row) for row in rows if row < count and row not in removed_rows]
    ranked = sorted(among, key=lambda row: -float(vectors[row] @ question))
    assert index.search_among(rows, question, 5) == ranked[:5]
    assert index.search_among(rows, question, 1000) == ranked


@pytest.mark.parametrize("flat_limit", [20, 1000])
def test_matching_chunks_are_found_behind_any_number_of_others(tmp_path: Path, flat_limit: int) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    for number in range(60):
        put(catalog, number, {"kind": "loud"}, f"the boat is red {number}", f"the boat is red again {number}")
    put(catalog, 60, {"kind": "quiet", "year": 1931}, "a boat that was painted green")
    put(catalog, 61, {"kind": "quiet", "year": 1889}, "the harbour")
    retriever = Retriever(catalog, WordEmbedder(), tmp_path / "index", Retrieval(flat_limit=flat_limit))

    def found(filter: Filter | None) -> set[str]:
        early: list[Chunk] = []
        hits = retriever.search("the boat is red", "default", 3, early.extend, filter)
        assert filter is None or {chunk.document_id for chunk in early} <= {"d60", "d61"}
        return {hit.chunk.document_id for hit in hits}

    assert not found(None) & {"d60", "d61"}
    assert found({"kind": "quiet"}) == {"d60", "d61"}
    assert found({"kind": ["quiet", "loud"], "year": 1931.0}) == {"d60"}
    assert found({"kind": "none"}) == set()
    catalog.remove("default", "d60")
    assert found({"kind": "quiet"}) == {"d61"}
    catalog.close()
