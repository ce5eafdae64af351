"""The catalogue returns what was stored, applies a change completely or not at all, and refuses a damaged file."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ragkv.catalog import (
    Catalog,
    CollectionInfo,
    DocumentOrder,
    DocumentVersion,
    EmbedderIdentity,
    StoredTurn,
    database,
)
from ragkv.errors import (
    CatalogCorrupt,
    ConfigError,
    EmbedderChanged,
    InputError,
    NotFound,
    RagkvError,
    StoreUnavailable,
)
from ragkv.types import Chunk, Document, HourPrice, Key
from tests.catalogs import on_sqlite, undo_migrations

WORDS = EmbedderIdentity("words", 4)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)


def put(
    catalog: Catalog,
    document_id: str,
    texts: list[str],
    collection: str = "default",
    embedder: EmbedderIdentity = WORDS,
    keys: list[str] | None = None,
) -> list[Key]:
    """Store a document whose chunks are `texts`; without `keys`, equal texts have equal keys."""
    chunks = [Chunk(f"{document_id}#{i}", document_id, i, "Title", text, (1, 2, i)) for i, text in enumerate(texts)]
    vectors = np.arange(len(texts) * embedder.dimension, dtype=np.float32).reshape(len(texts), -1) + len(texts[0])
    document = Document(document_id, "Title", "\n".join(texts), {"n": 1}, collection)
    chunk_keys = [Key(key) for key in keys or [f"{collection} {text}" for text in texts]]
    version = DocumentVersion(document, f"hash {texts}", chunks, vectors, chunk_keys, embedder, "reader")
    return catalog.put_document(version)


def rows_of(catalog: Catalog, collection: str = "default") -> list[int]:
    return [int(row) for row in catalog.vectors(collection)[0]]


# What was stored is what is returned


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(title=TEXTS, texts=st.lists(TEXTS, min_size=1, max_size=4), tokens=st.lists(st.integers(0, 2**31 - 1)))
def test_a_document_is_returned_unchanged(catalog: Catalog, title: str, texts: list[str], tokens: list[int]) -> None:
    metadata = {"tags": ["a", {"b": None}], "ö": 1.5}
    document = Document("d", title, " ".join(texts), metadata)
    chunks = [Chunk(f"d#{i}", "d", i, title, text, tuple(tokens)) for i, text in enumerate(texts)]
    vectors = np.random.default_rng(0).standard_normal((len(texts), 4), dtype=np.float32)
    keys = [Key("k")] * len(texts)
    catalog.put_document(DocumentVersion(document, "hash", chunks, vectors, keys, WORDS, "reader"))

    assert catalog.original("default", "d") == document
    assert catalog.chunks_of("default", "d") == chunks
    rows, stored = catalog.vectors("default")
    np.testing.assert_array_equal(stored, vectors)
    assert list(catalog.chunks("default", rows).values()) == chunks
    info = catalog.document("default", "d")
    assert (info.content_hash, info.reader, info.metadata) == ("hash", "reader", metadata)
    assert (info.chunks, info.tokens) == (len(texts), len(texts) * len(tokens))


def test_everything_survives_closing(path: Path) -> None:
    first = Catalog.open(path)
    put(first, "a", ["one", "two"])
    before = (first.documents(), first.chunks_of("default", "a"), first.generation("default"), first.embedder())
    first.close()
    again = Catalog.open(path)
    assert (again.documents(), again.chunks_of("default", "a"), again.generation("default"), again.embedder()) == before
    again.close()


def test_a_transaction_waits_for_the_disk_unless_it_is_said_not_to(path: Path) -> None:
    with closing(Catalog.open(path)) as catalog:
        for durable, level in ((False, 1), (True, 2), (False, 1)):
            with catalog.write(durable=durable) as transaction:
                assert transaction.exec_driver_sql("PRAGMA synchronous").fetchone() == (level,)


def test_vectors_keys_and_chunks_must_belong_together() -> None:
    document, chunk = Document("d", "t", "text"), Chunk("d#0", "d", 0, "t", "text", (1,))
    for vectors, keys in ((np.zeros((1, 3), np.float32), ["k"]), (np.zeros((1, 4), np.float32), [])):
        with pytest.raises(ValueError, match="belong together"):
            DocumentVersion(document, "h", [chunk], vectors, [Key(key) for key in keys], WORDS)


def test_documents_are_listed_by_collection_in_pages(catalog: Catalog) -> None:
    for collection, document_id in (("b", "x"), ("a", "y"), ("a", "x")):
        put(catalog, document_id, ["one", "two"], collection)
    assert [(d.collection, d.id, d.chunks, d.tokens) for d in catalog.documents()] == [
        ("a", "x", 2, 6),
        ("a", "y", 2, 6),
        ("b", "x", 2, 6),
    ]
    assert [d.id for d in catalog.documents("a")] == ["x", "y"]
    assert [d.id for d in catalog.page("a", after=("x", "x"), limit=1)] == ["y"]
    assert catalog.count() == (3, 6)


def test_a_missing_document_is_not_found(catalog: Catalog) -> None:
    put(catalog, "a", ["one"], "mine")
    for method in (catalog.document, catalog.original, catalog.chunks_of, catalog.remove):
        with pytest.raises(NotFound, match="'default' has no document 'a'"):
            method("default", "a")
    assert catalog.find("default", "a") is None


# Versions and KV keys


def test_a_new_version_replaces_the_old_one(catalog: Catalog) -> None:
    put(catalog, "a", ["one", "two", "three"])
    created, old = catalog.document("default", "a").created, rows_of(catalog)
    put(catalog, "a", ["four"])
    info = catalog.document("default", "a")
    assert [chunk.text for chunk in catalog.chunks_of("default", "a")] == ["four"]
    assert (info.chunks, info.created) == (1, created)
    assert info.updated > created
    assert not set(old) & set(rows_of(catalog)), "a row number must never be reused"
    assert catalog.chunks("default", old) == {}


def test_only_unreferenced_keys_are_orphans(catalog: Catalog) -> None:
    put(catalog, "a", ["shared", "only a", "twice", "twice"])
    put(catalog, "b", ["shared"])
    assert set(put(catalog, "a", ["new", "twice"])) == {"default only a"}
    assert set(catalog.remove("default", "a")) == {"default new", "default twice"}
    assert catalog.keys() == {"default shared"}
    with catalog.removing([Key("default shared"), Key("gone"), Key("gone")]) as removable:
        assert removable == {"gone"}
    assert catalog.remove("default", "b") == ["default shared"]
    assert catalog.count() == (0, 0)


def test_claimed_keys_are_not_removed_until_released_or_expired(catalog: Catalog) -> None:
    def free(*keys: str, grace: float = 100, mine: int | None = None) -> set[str]:
        with catalog.removing([Key(key) for key in keys], grace, mine) as found:
            return set(found)

    first, second = catalog.claim([Key("a"), Key("b"), Key("b")], "model"), catalog.claim([Key("b")], "model 2")
    assert free("a", "b", "c") == {"c"}
    assert free("a", "b", mine=first) == {"a"}, "the other claim still protects its key"
    assert catalog.fingerprint() == "model 2"
    with catalog.write() as connection:
        connection.exec_driver_sql("UPDATE claims SET renewed = renewed - 200")
    assert free("a", "b") == {"a", "b"}
    catalog.renew(second)
    assert free("a", "b") == {"a"}
    catalog.drop_expired_claims(100)
    catalog.release(second)
    assert free("a", "b") == {"a", "b"}
    with catalog.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM claimed").fetchone() == (0,)


def test_the_commit_of_a_document_releases_its_claim_or_neither_happens(catalog: Catalog) -> None:
    chunk, vector = Chunk("a#0", "a", 0, "t", "text", (1, 2, 3)), np.ones((1, WORDS.dimension), np.float32)

    def refuse(others: int, files: int) -> None:
        raise InputError(f"{others} others")

    def commit(document_id: str, admit: Callable[[int, int], None] | None) -> None:
        document = Document(document_id, "t", "text")
        version = DocumentVersion(document, "h", [chunk], vector, [Key("k")], WORDS, "r")
        catalog.put_document(version, claim, admit)

    claim = catalog.claim([Key("k")], "model")
    with pytest.raises(InputError, match="0 others"):
        commit("a", refuse)
    with catalog.removing([Key("k")]) as removable:
        assert not removable
    assert catalog.documents() == []
    commit("a", None)
    with catalog.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM claims").fetchone() == (0,)
    with pytest.raises(InputError, match="3 others"):
        commit("b", refuse)
    assert [catalog.held("default"), catalog.held("default", "a"), catalog.held("x")] == [(3, 0), (0, 0), (0, 0)]


def test_an_old_catalogue_without_claims_gets_their_tables(path: Path) -> None:
    catalog = Catalog.open(path)
    put(catalog, "a", ["text"])
    with catalog.write() as connection:
        undo_migrations(connection.driver)
        connection.exec_driver_sql("DROP TABLE claimed")
        connection.exec_driver_sql("DROP TABLE claims")
    catalog.close()
    catalog = Catalog.open(path)
    catalog.release(catalog.claim([Key("k")], "model"))
    assert catalog.count() == (1, 1)
    catalog.close()


def test_an_old_catalogue_without_conversations_gets_their_table(path: Path) -> None:
    catalog = Catalog.open(path)
    with catalog.write() as connection:
        undo_migrations(connection.driver)
        connection.exec_driver_sql("DROP TABLE turns")
    catalog.close()
    catalog = Catalog.open(path)
    turn = StoredTurn("Who?", "Ada", (1, 2), (3,), ((7, "a#0"),), "full", "model")
    row = catalog.add_turn("default", "conversation", [], turn)
    found = catalog.turns("default", "conversation")
    assert found == [replace(turn, row=row, created=found[0].created)]
    catalog.close()


def test_an_old_catalogue_without_paces_gets_them_and_the_indexes(path: Path) -> None:
    catalog = Catalog.open(path)
    put(catalog, "a", ["text"])
    with catalog.write() as connection:
        undo_migrations(connection.driver)
        connection.exec_driver_sql("DROP TABLE paces")
        connection.exec_driver_sql("DROP INDEX job_documents_by_id")
    catalog.close()
    catalog = Catalog.open(path)
    with catalog.read() as connection:
        names = {name for (name,) in connection.exec_driver_sql("SELECT name FROM sqlite_master")}
    assert {"paces", "job_documents_by_id"} <= names
    catalog.close()


def test_collections_are_listed_by_the_prefix_of_their_names(catalog: Catalog) -> None:
    for collection in ("ours:a", "ours:b", "theirs:a", "ours"):
        put(catalog, "x", ["one", "two"], collection=collection)
    put(catalog, "y", ["three"], collection="ours:a")
    assert catalog.collections("ours:") == [CollectionInfo("ours:a", 2, 3, 9), CollectionInfo("ours:b", 1, 2, 6)]
    assert [info.name for info in catalog.collections()] == ["ours", "ours:a", "ours:b", "theirs:a"]


def test_clearing_a_collection_keeps_the_keys_that_others_share(catalog: Catalog) -> None:
    put(catalog, "x", ["shared", "own"], collection="a", keys=["shared", "own"])
    put(catalog, "x", ["shared"], collection="b", keys=["shared"])
    catalog.add_turn("a", "conversation", [], StoredTurn("Who?", "Ada", (1,), (2,), (), "full", "model"))
    generation = catalog.generation("a")
    assert catalog.clear("a") == ["own"]
    assert (catalog.turns("a", "conversation"), catalog.vectors("a")[0].size) == ([], 0)
    assert not catalog.has_words or catalog.match("a", "shared", 5) == []
    assert catalog.generation("a") > generation
    assert [info.collection for info in catalog.documents()] == ["b"]


def test_a_turn_is_stored_only_after_the_turns_that_it_was_answered_after(catalog: Catalog) -> None:
    turn = StoredTurn("Who?", "Ada", (1,), (3,), (), "full", "model")
    first = catalog.add_turn("default", "conversation", [], turn)
    assert first is not None
    second = catalog.add_turn("default", "conversation", [first], turn)
    assert catalog.add_turn("other", "conversation", [first], turn) is None, "another collection has no such turn"
    assert [found.row for found in catalog.turns("default", "conversation")] == [first, second]
    catalog.remove_conversation("default", "conversation")
    assert catalog.add_turn("default", "conversation", [first, second], turn) is None, (
        "a removed conversation is not recreated"
    )
    assert catalog.turns("default", "conversation") == []
    with pytest.raises(NotFound, match="conversation"):
        catalog.remove_conversation("default", "conversation")
    assert catalog.add_turn("default", "conversation", [], turn) not in (first, second)


@on_sqlite
def test_a_copy_is_an_independent_catalogue(catalog: Catalog, tmp_path: Path) -> None:
    put(catalog, "a", ["text"])
    catalog.copy(tmp_path / "copy.sqlite")
    put(catalog, "b", ["later"])
    copy = Catalog.open(tmp_path / "copy.sqlite")
    assert ([d.id for d in copy.documents()], copy.keys()) == (["a"], {"default text"})
    copy.close()
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy.sqlite"]


def test_collections_do_not_see_each_other(catalog: Catalog) -> None:
    put(catalog, "a", ["secret harbour"], "theirs")
    put(catalog, "a", ["open harbour"], "ours")
    theirs = rows_of(catalog, "theirs")
    assert catalog.chunks("ours", theirs) == {}
    if catalog.has_words:
        assert [row for row, _ in catalog.match("ours", "secret harbour", 10)] == rows_of(catalog, "ours")
    assert catalog.remove("ours", "a") == ["ours open harbour"]
    assert rows_of(catalog, "theirs") == theirs


# Generations and changes


def test_every_change_raises_the_generation_of_its_collection_only(catalog: Catalog) -> None:
    put(catalog, "x", ["other"], "other")
    unchanged = catalog.generation("other")
    seen = [catalog.generation("default")]
    assert seen == [0]
    for text in ("one", "two"):
        put(catalog, "a", [text])
        seen.append(catalog.generation("default"))
    catalog.remove("default", "a")
    seen.append(catalog.generation("default"))
    assert seen == sorted(set(seen))
    assert catalog.generation("other") == unchanged


def test_a_generation_is_not_reused_after_a_backup_is_restored(path: Path, tmp_path: Path) -> None:
    catalog = Catalog.open(path)
    put(catalog, "a", ["one"])
    catalog.close()
    backup = shutil.copy(path, tmp_path / "backup")
    generations = []
    for text in ("two", "three"):
        catalog = Catalog.open(path)
        put(catalog, "a", [text])
        generations.append(catalog.generation("default"))
        catalog.close()
        shutil.copy(backup, path)
    assert generations[0] != generations[1]


class ChangesMachine(RuleBasedStateMachine):
    """An index that only applies `changes` always equals `vectors`."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog.open(self.folder / os.urandom(8).hex() / "catalog.sqlite")
        self.index: dict[int, bytes] = {}
        self.generation = 0

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 3))
    def put(self, name: str, count: int) -> None:
        put(self.catalog, name, [f"text {i} {count}" for i in range(count)])

    @rule(name=st.sampled_from("abc"))
    def remove(self, name: str) -> None:
        if self.catalog.find("default", name):
            self.catalog.remove("default", name)

    @rule()
    def embed_again(self) -> None:
        rows = [passage.row for passage in self.catalog.passages()]
        self.catalog.replace_vectors(rows, np.random.default_rng().random((len(rows), 4), np.float32), WORDS)

    @rule()
    def apply_changes(self) -> None:
        changes = self.catalog.changes("default", np.array(sorted(self.index), np.int64), self.generation)
        for row in changes.removed:
            del self.index[int(row)]
        self.index |= {int(row): vector.tobytes() for row, vector in zip(changes.added, changes.vectors, strict=True)}
        self.generation = changes.generation
        rows, vectors = self.catalog.vectors("default")
        assert self.index == {int(row): vector.tobytes() for row, vector in zip(rows, vectors, strict=True)}

    @invariant()
    def an_unchanged_generation_means_unchanged_vectors(self) -> None:
        if self.catalog.generation("default") == self.generation:
            assert sorted(self.index) == rows_of(self.catalog)

    def teardown(self) -> None:
        self.catalog.close()


def test_applying_changes_gives_the_same_as_loading_everything(tmp_path: Path) -> None:
    class Here(ChangesMachine):
        folder = tmp_path

    run_state_machine_as_test(Here, settings=settings(max_examples=25, stateful_step_count=15, deadline=None))


# Full text


@on_sqlite
def test_full_text_finds_word_forms_in_texts_and_titles(catalog: Catalog) -> None:
    put(catalog, "a", ["The ferries crossed the Øresund", "Zürich café"])
    rows = rows_of(catalog)
    assert [row for row, _ in catalog.match("default", "Which ferry was crossing?", 5)] == [rows[0]]
    assert [row for row, _ in catalog.match("default", "ZURICH", 5)] == [rows[1]]
    assert {row for row, _ in catalog.match("default", "title", 5)} == set(rows)
    assert catalog.match("default", "submarine", 5) == []


def test_the_file_of_a_document_is_known_until_it_is_removed(catalog: Catalog) -> None:
    for name in ("a", "b"):
        put(catalog, name, ["text"])
    assert catalog.document_from("default", "/notes/a.md") is None
    catalog.note_source(Document("a", "", "", source="/notes/a.md"))
    catalog.note_source(Document("b", "", "", source=f"/{'x' * 2000}"))  # longer than what an index holds
    catalog.note_source(Document("none", "", "", source="/notes/none.md"))
    assert {info.id: info.source for info in catalog.documents()} == {"a": "/notes/a.md", "b": ""}
    assert catalog.document_from("default", "/notes/a.md") == "a"
    assert catalog.document_from("other", "/notes/a.md") is None
    put(catalog, "a", ["changed"])  # over HTTP, say
    assert catalog.document_from("default", "/notes/a.md") == "a"
    catalog.note_source(Document("a", "", "", source="/moved/a.md"))
    assert [catalog.document_from("default", f"/{where}") for where in ("notes/a.md", "moved/a.md")] == [None, "a"]
    catalog.remove("default", "a")
    assert catalog.document_from("default", "/moved/a.md") is None


HIDDEN = (
    "The ware\xadhouse keeper is Ma\u200bthil\u200bde. The \ufb01re exit cost 48\u202f000 ｃｒｏｗｎｓ. Cafe\u0301."
)


@pytest.mark.parametrize(
    "word", ["warehouse", "ware\xadhouse", "Mathilde", "fire", "48,000", "48000", "crowns", "café"]
)
def test_words_are_found_behind_characters_that_nobody_sees(catalog: Catalog, word: str) -> None:
    if catalog.has_words:
        put(catalog, "a", ["Nothing of it.", HIDDEN])
        assert [row for row, _ in catalog.match("default", word, 5)] == rows_of(catalog)[1:]
        put(catalog, "b", [word])
        assert len(catalog.match("default", HIDDEN, 5)) == 2, "and the other way round"
        catalog.remove("default", "a")
        assert len(catalog.match("default", word, 5)) == 1


def test_documents_are_listed_by_words_in_either_form(catalog: Catalog) -> None:
    put(catalog, "Cafe\u0301 of Tarn", ["text"])
    for words in ("café", "CAFE\u0301 ta\u200brn", "ｔａｒｎ"):
        assert len(catalog.documents("default", DocumentOrder(words=words))) == 1


def test_a_full_text_index_of_an_earlier_release_is_built_again_once(path: Path) -> None:
    catalog = Catalog.open(path)
    put(catalog, "a", [HIDDEN])
    catalog.close()
    with closing(sqlite3.connect(path)) as connection:
        for name in ("insert", "delete"):
            connection.execute(f"DROP TRIGGER chunk_words_{name}")
        connection.execute("DROP TABLE chunk_words")
        connection.execute("DROP VIEW searched_chunks")
        connection.execute(
            "CREATE VIRTUAL TABLE chunk_words USING fts5(title, text, content='chunks', content_rowid='row')"
        )
        connection.execute("INSERT INTO chunk_words (chunk_words) VALUES ('rebuild')")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    catalog = Catalog.open(path)
    assert len(catalog.match("default", "warehouse", 5)) == 1
    catalog.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,), "an older ragkv does not know its triggers"
        before = connection.execute("SELECT max(rowid), count(*) FROM sqlite_master").fetchone()
    Catalog.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT max(rowid), count(*) FROM sqlite_master").fetchone() == before


@on_sqlite
def test_rarer_words_rank_higher(catalog: Catalog) -> None:
    put(catalog, "a", ["boat boat boat", "boat anchor", "boat sail", "boat mast"])
    best, *rest = catalog.match("default", "boat anchor", 10)
    assert best[0] == rows_of(catalog)[1]
    assert all(best[1] > score for _, score in rest)


@on_sqlite
def test_chunks_with_every_word_are_found_by_their_forms(catalog: Catalog) -> None:
    put(catalog, "a", ["boats and an anchor", "boat sail", "anchors"])
    assert [row for row, _ in catalog.match("default", "Which boat has the anchors?", 5, every=True)] == [1]
    assert catalog.match("default", "boat, anchor, mast", 5, every=True) == []
    assert catalog.match("default", "boat", 5, every=True) == [], "a word alone says no more than `boat` as it is"


@on_sqlite
def test_a_question_of_only_stop_words_is_still_searched(catalog: Catalog) -> None:
    put(catalog, "a", ["to be or not to be", "boat"])
    assert [row for row, _ in catalog.match("default", "to be", 5)] == rows_of(catalog)[:1]


@on_sqlite
def test_deleted_words_are_not_found(catalog: Catalog) -> None:
    put(catalog, "a", ["anchor"])
    put(catalog, "a", ["sail"])
    assert catalog.match("default", "anchor", 5) == []
    catalog.remove("default", "a")
    assert catalog.match("default", "sail", 5) == []


HOSTILE = [
    "'; DROP TABLE chunks; --",
    "NOT",
    "NEAR(",
    "nothing:",
    "^x",
    "x*",
    "{x y}: z",
    "x" * 100_000,
    "word " * 20_000,
]
WORDLESS = ["", " ", '"', '""', "(", "-", "+", "*", "_", "🚢", "\0", "\ud800"]


@on_sqlite
@pytest.mark.parametrize("text", HOSTILE + WORDLESS, ids=lambda text: repr(text[:12]))
def test_any_text_is_a_safe_query(catalog: Catalog, text: str) -> None:
    put(catalog, "a", ["a boat"])
    rows = rows_of(catalog)
    assert catalog.match("default", text, 5) == []
    assert [row for row, _ in catalog.match("default", f'{text} "boat" AND {text}', 5)] == rows


@on_sqlite
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(text=st.text())
def test_no_text_breaks_the_search(catalog: Catalog, text: str) -> None:
    catalog.match("default", text, 5)


DAMAGES = {
    "parts dropped": "DROP TABLE chunk_words_config",
    "table dropped": "DROP TABLE chunk_words",
    "segments emptied": "DELETE FROM chunk_words_data",
    "segment garbled": "UPDATE chunk_words_data SET block = x'00ff00ff' WHERE id > 10",
    "sizes lost": "DELETE FROM chunk_words_docsize",
    "trigger dropped": "DROP TRIGGER chunk_words_delete",
    "index emptied": "INSERT INTO chunk_words (chunk_words) VALUES ('delete-all')",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_full_text_index_is_rebuilt_at_open(path: Path, damage: str) -> None:
    catalog = Catalog.open(path)
    put(catalog, "a", ["anchor", "sail"])
    catalog.close()
    connection = sqlite3.connect(path)
    connection.execute(damage)
    connection.commit()
    connection.close()

    catalog = Catalog.open(path)
    assert [row for row, _ in catalog.match("default", "anchor", 5)] == rows_of(catalog)[:1]
    put(catalog, "a", ["mast"])
    assert catalog.match("default", "anchor", 5) == []
    assert len(catalog.match("default", "mast", 5)) == 1
    catalog.close()


@on_sqlite
def test_damage_to_the_open_full_text_index_is_reported_with_its_repair(path: Path, catalog: Catalog) -> None:
    put(catalog, "a", ["anchor", "sail"])
    with catalog.write() as connection:
        connection.exec_driver_sql("UPDATE chunk_words_data SET block = x'00ff00ff' WHERE id > 10")
    with (
        catalog.read(),
        pytest.raises(CatalogCorrupt, match="ragkv reindex"),
    ):  # uncached
        catalog.match("default", "anchor", 5)
    catalog.rebuild_full_text()
    assert len(catalog.match("default", "anchor", 5)) == 1


# Embedder


def test_vectors_of_another_embedder_are_refused(catalog: Catalog) -> None:
    assert catalog.embedder() is None
    put(catalog, "a", ["one"])
    for other in (EmbedderIdentity("others", 4), EmbedderIdentity("words", 8)):
        for attempt in (lambda: catalog.check_embedder(other), lambda: put(catalog, "b", ["two"], embedder=other)):  # noqa: B023
            with pytest.raises(EmbedderChanged, match="ragkv reindex"):
                attempt()
    assert [d.id for d in catalog.documents()] == ["a"]
    assert catalog.embedder() == WORDS


def test_an_empty_catalogue_takes_any_embedder(catalog: Catalog) -> None:
    put(catalog, "a", ["one"])
    catalog.remove("default", "a")
    put(catalog, "a", ["one"], embedder=EmbedderIdentity("others", 8))
    assert catalog.embedder() == EmbedderIdentity("others", 8)


def test_all_vectors_are_replaced_in_one_transaction(catalog: Catalog) -> None:
    put(catalog, "a", ["one", "two"])
    put(catalog, "b", ["three"], "other")
    before = catalog.generation("default")
    passages = catalog.passages(limit=2)
    passages += catalog.passages(after=passages[-1].row)
    assert [passage.text for passage in passages] == ["one", "two", "three"]
    others = EmbedderIdentity("others", 8)
    matrix = np.random.default_rng(1).random((3, 8), np.float32)
    catalog.replace_vectors([passage.row for passage in passages], matrix, others)
    assert catalog.embedder() == others
    np.testing.assert_array_equal(catalog.vectors("default")[1], matrix[:2])
    np.testing.assert_array_equal(catalog.vectors("other")[1], matrix[2:])
    assert catalog.generation("default") > before


def test_replacing_vectors_fails_if_chunks_changed_meanwhile(catalog: Catalog) -> None:
    put(catalog, "a", ["one"])
    rows = [passage.row for passage in catalog.passages()]
    put(catalog, "b", ["two"])
    with pytest.raises(InputError, match="once more"):
        catalog.replace_vectors(rows, np.zeros((1, 4), np.float32), WORDS)
    assert np.all(catalog.vectors("default")[1] != 0) or len(rows_of(catalog)) == 2


@on_sqlite
def test_a_missing_vector_is_reported(path: Path, catalog: Catalog) -> None:
    put(catalog, "a", ["one", "two"])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM vectors WHERE chunk = 1")
    connection.close()
    with pytest.raises(CatalogCorrupt, match="ragkv reindex"):
        catalog.vectors("default")


# Damage


def filled(path: Path) -> bytes:
    catalog = Catalog.open(path)
    for number in range(30):
        put(catalog, f"d{number}", [f"text {number} " * 40, "more " * 300])
    catalog.close()
    return path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 50, 99, 100, 4095, 4096, 8191, 40960, 50_000, -4096, -1])
def test_a_truncated_file_is_refused(path: Path, size: int) -> None:
    whole = filled(path)
    path.write_bytes(whole[:size])
    with pytest.raises(CatalogCorrupt, match="restore a backup"):
        Catalog.open(path)
    assert path.read_bytes() == whole[:size], "the damaged file must be left as it is"


@pytest.mark.parametrize("where", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_a_page_of_garbage_is_refused(path: Path, where: float) -> None:
    whole = bytearray(filled(path))
    page = int(where * len(whole)) // 4096 * 4096
    whole[page : page + 4096] = os.urandom(4096)
    path.write_bytes(whole)
    with pytest.raises(CatalogCorrupt):
        Catalog.open(path)


def test_a_missing_file_with_a_leftover_log_is_refused(path: Path) -> None:
    filled(path)
    path.unlink()
    path.with_name(path.name + "-wal").write_bytes(b"x" * 100)
    with pytest.raises(CatalogCorrupt):
        Catalog.open(path)
    assert not path.exists()


def test_missing_tables_are_damage(path: Path) -> None:
    filled(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE vectors")
    connection.close()
    with pytest.raises(CatalogCorrupt, match="tables are missing"):
        Catalog.open(path)


def test_damage_done_while_open_is_reported(path: Path) -> None:
    filled(path)
    catalog = Catalog.open(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with catalog.read(), pytest.raises(CatalogCorrupt):  # The second connection has nothing cached.
        catalog.documents()
    catalog.close()


def test_a_file_that_is_not_ours_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(ConfigError, match="another program"):
        Catalog.open(path)


def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    Catalog.open(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="newer ragkv"):
        Catalog.open(path)


def test_a_folder_that_cannot_be_created_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot"):
        Catalog.open(tmp_path / "file" / "catalog.sqlite")


def test_a_failed_put_changes_nothing(catalog: Catalog) -> None:
    put(catalog, "a", ["one"])
    before = (catalog.documents(), catalog.generation("default"), catalog.keys())
    chunks = [Chunk("a#0", "a", 0, "t", "new", (1,)), Chunk("a#0", "a", 0, "t", "same ordinal", (1,))]
    vectors, keys = np.zeros((2, 4), np.float32), [Key("k")] * 2
    with pytest.raises(Exception, match=r"(?i)unique"):
        catalog.put_document(DocumentVersion(Document("a", "t", "new"), "h", chunks, vectors, keys, WORDS))
    assert (catalog.documents(), catalog.generation("default"), catalog.keys()) == before


# Disk full

FULL = """
import os, sys
from pathlib import Path
import numpy as np
from ragkv.catalog import Catalog, DocumentVersion, EmbedderIdentity
from ragkv.errors import StoreFull, StoreUnavailable
from ragkv.types import Chunk, Document, Key

path, ballast = Path(sys.argv[1]), Path(sys.argv[2])
catalog = Catalog.open(path)

def put(name, size):
    chunk = Chunk(f"{name}#0", name, 0, "t", "word " * size, (1,))
    vectors, embedder = np.ones((1, 4), "f4"), EmbedderIdentity("e", 4)
    catalog.put_document(DocumentVersion(Document(name, "t", "x"), "h", [chunk], vectors, [Key(name)], embedder))

put("first", 10)
ballast.write_bytes(b"x" * 500_000)
try:
    put("large", 400_000)
    sys.exit("the document was stored")
except (StoreFull, StoreUnavailable) as error:
    print(type(error).__name__)
assert [d.id for d in catalog.documents()] == ["first"] and len(catalog.match("default", "word", 5)) == 1
ballast.unlink()
put("second", 10)
assert [d.id for d in catalog.documents()] == ["first", "second"]
catalog.close()
Catalog.open(path).close()
print("recovered")
"""


def test_a_full_disk_changes_nothing_and_passes(tmp_path: Path, root: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    script = f'mount -t tmpfs -o size=2m tmpfs {mount} && exec "$0" -c "$1" {mount}/catalog.sqlite {mount}/ballast'
    probe = ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {mount}"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a user mount a small disk")
    command = ["unshare", "-Urm", "sh", "-c", script, sys.executable, FULL]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "StoreFull" in done.stdout
    assert "recovered" in done.stdout


def test_a_change_that_met_a_full_disk_is_applied_where_something_gave_way(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    put(catalog, "a", ["one"])
    asked: list[tuple[Path, bool]] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def give_way(path: Path, size: int, full: bool) -> bool:
        asked.append((path, full))
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return full

    catalog._database._give_way = give_way  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        catalog.remove("default", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert asked == [(tmp_path / "catalog.sqlite", full) for full in (False, True, False)]
    assert catalog.documents() == []


def test_a_damaged_catalogue_is_not_used_any_more(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    catalog = Catalog.open(path)
    put(catalog, "a", ["one"])
    catalog.check()
    assert catalog.damage is None
    whole = {tmp_path / name: (tmp_path / name).read_bytes() for name in (path.name + "-wal", path.name)}
    for file, content in whole.items():
        with file.open("r+b") as damaged:
            damaged.write(bytes(min(4096, len(content))))
    assert catalog.count() == (1, 1), "this connection has all in memory"
    with pytest.raises(CatalogCorrupt, match="restore a backup"):
        catalog.check()
    for file, content in whole.items():
        file.write_bytes(content)
    for call in (catalog.count, catalog.documents, lambda: catalog.remove("default", "a")):
        with pytest.raises(CatalogCorrupt):
            call()
    assert isinstance(catalog.damage, CatalogCorrupt)


def test_a_file_size_limit_changes_nothing(tmp_path: Path, root: Path) -> None:
    limited = FULL.replace(
        "ballast.write_bytes",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, -1)); ballast.write_bytes",
    ).replace("ballast.unlink()", "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)); ballast.unlink()")
    command = [sys.executable, "-c", limited, str(tmp_path / "catalog.sqlite"), str(tmp_path / "ballast")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "recovered" in done.stdout


# Concurrency


def test_readers_see_whole_versions_while_a_writer_works(catalog: Catalog) -> None:
    put(catalog, "a", ["v0 part"] * 3)
    errors: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            texts = {chunk.text for chunk in catalog.chunks_of("default", "a")}
            rows, vectors = catalog.vectors("default")
            if len(texts) != 1 or len(rows) != len(vectors):
                errors.append(str(texts))

    def write(name: str) -> None:
        for number in range(20):
            put(catalog, name, [f"v{number} part"] * (number % 5 + 1))

    readers = [threading.Thread(target=read) for _ in range(3)]
    writers = [threading.Thread(target=write, args=(name,)) for name in "aab"]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert not errors
    assert {d.id for d in catalog.documents()} == {"a", "b"}


def test_another_process_sees_and_changes_the_same_catalogue(path: Path, root: Path) -> None:
    catalog = Catalog.open(path)
    put(catalog, "a", ["one"])
    before = catalog.generation("default")
    script = (
        "import sys; from pathlib import Path; from ragkv.catalog import Catalog; c = Catalog.open(Path(sys.argv[1]))"
    )
    script += "; print(c.remove('default', 'a')); c.close()"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "['default one']", done.stderr
    assert catalog.documents() == []
    assert catalog.generation("default") > before
    catalog.close()


def test_a_catalogue_locked_by_another_writer_is_reported_as_busy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    catalog = Catalog.open(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="busy"):
        put(catalog, "a", ["one"])
    assert catalog.documents() == [], "readers do not wait"
    other.execute("ROLLBACK")
    other.close()
    put(catalog, "a", ["one"])
    catalog.close()


def test_using_a_closed_catalogue_is_an_error(path: Path) -> None:
    catalog = Catalog.open(path)
    catalog.close()
    with pytest.raises(RagkvError, match="closed"):
        catalog.documents()


@pytest.mark.usefixtures("created_anew")
def test_creating_leaves_no_temporary_files(path: Path) -> None:
    Catalog.open(path).close()
    assert [file.name for file in path.parent.iterdir()] == ["catalog.sqlite"]


@on_sqlite
def test_the_file_is_safe_against_power_loss(catalog: Catalog) -> None:
    with catalog.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.exec_driver_sql("PRAGMA synchronous").fetchone() == (2,)
        assert connection.exec_driver_sql("PRAGMA foreign_keys").fetchone() == (1,)


def test_documents_are_listed_by_folder(catalog: Catalog) -> None:
    for id in ("a%/one.md", "a%/b/two.md", "ab/three.md", "a.md"):
        put(catalog, id, ["text"])
    order = DocumentOrder(folder="a%/")
    assert [info.id for info in catalog.documents("default", order)] == ["a%/b/two.md", "a%/one.md"]
    first = catalog.page("default", None, 1, None, order)
    assert [info.id for info in first] == ["a%/b/two.md"]
    assert [info.id for info in catalog.page("default", order.place(first[0]), 5, None, order)] == ["a%/one.md"]


def test_a_document_that_is_to_be_read_again_keeps_its_content(catalog: Catalog) -> None:
    put(catalog, "a", ["text"])
    put(catalog, "b", ["text"])
    before = catalog.find("default", "a")
    catalog.read_again("default", ["a", "gone"])
    after, other = catalog.find("default", "a"), catalog.find("default", "b")
    assert before is not None
    assert after is not None
    assert other is not None
    assert after == replace(before, reader="")
    assert other.reader == before.reader


def test_the_price_of_an_hour_is_kept_and_taken_back(catalog: Catalog) -> None:
    assert catalog.hour_price() is None
    catalog.record_hour_price(HourPrice(2.5, "USD"))
    catalog.record_hour_price(HourPrice(3.0, "EUR"))
    assert catalog.hour_price() == HourPrice(3.0, "EUR")
    catalog.record_hour_price(None)
    assert catalog.hour_price() is None
