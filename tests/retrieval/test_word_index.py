"""A word index beside the catalogue finds what the one inside finds, with the same scores, whatever happens to it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.catalog import Catalog
from ragkv.retrieval import SearchScope
from ragkv.retrieval import word_index as words_module
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.word_index import CatalogWords, ReplicaWords
from tests.retrieval.writer import put

DOCUMENTS, COLLECTIONS = ("a", "b", "c"), ("default", "ours")
WORDS = ("boat", "boats", "Boating", "Zürich", "zurich", "naïve", "the", "is", "anchor", "x1", "über", "ﬁnd", "東京")
TEXT = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)
METADATA = st.dictionaries(st.sampled_from(("kind", "year")), st.sampled_from((1, 2, "old")), max_size=2)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index" / "words.sqlite"


def open_words(catalog: Catalog, path: Path) -> ReplicaWords:
    return ReplicaWords(catalog, path, Freshness(catalog))


def texts(catalog: Catalog, index: ReplicaWords | CatalogWords, query: str, collection: str = "default") -> list[str]:
    found = index.match(SearchScope(collection), query, 9)
    chunks = catalog.chunks(collection, [row for row, _ in found])
    return [chunks[row].text for row, _ in found if row in chunks]  # another thread may have replaced one


PUT = st.tuples(
    st.sampled_from(COLLECTIONS), st.sampled_from(DOCUMENTS), st.lists(TEXT, min_size=1, max_size=4), METADATA
)
REMOVE = st.tuples(st.sampled_from(COLLECTIONS), st.sampled_from(DOCUMENTS))
SCOPE = st.builds(
    SearchScope,
    st.sampled_from(COLLECTIONS),
    st.none() | METADATA,
    st.none() | st.lists(st.sampled_from(DOCUMENTS)).map(tuple),
)
SEARCH = st.tuples(SCOPE, TEXT, st.integers(1, 9))


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(PUT | REMOVE | SEARCH, min_size=4, max_size=10), last=SEARCH)
def test_every_search_equals_that_of_the_catalogue(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple], last: tuple
) -> None:
    folder = tmp_path_factory.mktemp("words")
    catalog = Catalog.open(folder / "catalog.sqlite")
    inside, beside = CatalogWords(catalog), open_words(catalog, folder / "words.sqlite")
    for step in (*steps, last):
        if len(step) == 4:
            put(catalog, step[1], *step[2], collection=step[0], **step[3])
        elif len(step) == 2:
            if catalog.find(*step):
                catalog.remove(*step)
        else:
            for collection in COLLECTIONS:  # the statistics of BM25 count all chunks that an index has
                beside.refresh(collection)
            assert all(beside.match(*step, every) == inside.match(*step, every) for every in (False, True))
    beside.close()
    catalog.close()


def test_an_update_reads_what_changed(catalog: Catalog, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_words(catalog, path)
    put(catalog, "a", "red boat", "blue boat")
    assert sorted(texts(catalog, index, "boat")) == ["blue boat", "red boat"]
    given, ask = [], catalog.passage_changes

    def record(*arguments):  # type: ignore[no-untyped-def]
        given.append(ask(*arguments))
        return given[-1]

    monkeypatch.setattr(catalog, "passage_changes", record)
    texts(catalog, index, "boat")
    assert given == [], "a fresh index asks for no changes"
    put(catalog, "b", "green boat")
    catalog.remove("default", "a")
    assert texts(catalog, index, "boat") == ["green boat"]
    assert [([each.text for each in changes.added], len(changes.removed)) for changes in given] == [(["green boat"], 2)]


def test_an_index_is_kept_between_starts(catalog: Catalog, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(catalog, "a", "red boat")
    first = open_words(catalog, path)
    first.refresh("default")
    first.close()
    monkeypatch.setattr(catalog, "passage_changes", None)
    assert texts(catalog, open_words(catalog, path), "boat") == ["red boat"]


def test_a_long_update_goes_on_where_it_was_interrupted(
    catalog: Catalog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "STEP", 3)
    put(catalog, "a", *(f"boat {n}" for n in range(8)))
    ask, calls = catalog.passage_changes, list[int]()

    def fail_in_the_third_step(collection, known, since, limit):  # type: ignore[no-untyped-def]
        calls.append(len(known))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ask(collection, known, since, limit)

    monkeypatch.setattr(catalog, "passage_changes", fail_in_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        open_words(catalog, path).refresh("default")
    assert len(texts(catalog, open_words(catalog, path), "boat")) == 8
    assert calls == [0, 3, 6, 6]


def test_collections_are_apart(catalog: Catalog, path: Path) -> None:
    index = open_words(catalog, path)
    put(catalog, "a", "the secret boat", collection="theirs")
    put(catalog, "a", "the open boat", collection="ours")
    assert texts(catalog, index, "secret", "theirs") == ["the secret boat"]
    assert texts(catalog, index, "secret boat", "ours") == ["the open boat"]
    catalog.clear("theirs")
    assert texts(catalog, index, "secret", "theirs") == []
    assert index.match(SearchScope("unknown"), "boat", 5) == []


def test_processes_that_share_a_folder_share_the_file(catalog: Catalog, path: Path) -> None:
    indexes = [open_words(catalog, path) for _ in range(4)]
    failures = list[str]()

    def work(index: ReplicaWords, number: int) -> None:
        for turn in range(5):
            put(catalog, f"d{number}", f"boat {number} {turn}")
            found = texts(catalog, index, f"boat {number}")
            if f"boat {number} {turn}" not in found:
                failures.append(f"{number} {turn}: {found}")

    threads = [threading.Thread(target=work, args=(index, number)) for number, index in enumerate(indexes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [sorted(texts(catalog, index, "boat")) for index in indexes] == [[f"boat {n} 4" for n in range(4)]] * 4
    for index in indexes:
        index.close()


@pytest.mark.parametrize("damage", ["garbage", "empty", "truncated", "table", "words", "format", "release", "flipped"])
def test_a_damaged_index_is_built_again(catalog: Catalog, path: Path, damage: str) -> None:
    put(catalog, "a", "red boat", *(f"word{n}" * 40 for n in range(200)))
    index = open_words(catalog, path)
    index.refresh("default")
    index.close()
    if damage in {"table", "words", "format", "release"}:
        sql = {
            "table": "DROP TABLE collections",
            "words": "DELETE FROM chunk_words_data WHERE id > 10",
            "format": "UPDATE facts SET value = '0'",
            "release": "DROP VIEW searched_chunks",  # which an earlier release does not have
        }[damage]
        connection = sqlite3.connect(path)
        connection.execute(sql)
        connection.commit()
        connection.close()
    else:
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes(byte ^ 255 for byte in whole[middle : middle + 4096]) + whole[middle + 4096 :]
        path.write_bytes(
            {"garbage": os.urandom(9000), "empty": b"", "truncated": whole[:-5000], "flipped": flipped}[damage]
        )
    assert texts(catalog, open_words(catalog, path), "boat") == ["red boat"]
    assert texts(catalog, open_words(catalog, path), "word7" * 40) == ["word7" * 40]


def test_damage_while_the_index_is_open_is_repaired(catalog: Catalog, path: Path) -> None:
    put(catalog, "a", "red boat")
    index = open_words(catalog, path)
    assert texts(catalog, index, "boat") == ["red boat"]
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE chunk_words")
    connection.commit()
    connection.close()
    assert texts(catalog, index, "boat") == ["red boat"]


def test_without_a_writable_folder_nothing_is_found_by_words(
    catalog: Catalog, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file where the folder should be")
    put(catalog, "a", "red boat")
    assert open_words(catalog, path).match(SearchScope(), "boat", 5) == []
    assert "word index" in caplog.text


def test_a_catalogue_from_a_backup_replaces_what_the_index_holds(catalog: Catalog, path: Path, tmp_path: Path) -> None:
    put(catalog, "a", "red boat")
    catalog.copy(tmp_path / "backup.sqlite")
    put(catalog, "b", "green boat")
    first = open_words(catalog, path)
    assert len(texts(catalog, first, "boat")) == 2
    first.close()
    restored = Catalog.open(tmp_path / "backup.sqlite")
    assert texts(restored, open_words(restored, path), "boat") == ["red boat"], "the catalogue is older than the index"
    second = open_words(catalog, path)
    assert len(texts(catalog, second, "boat")) == 2
    put(restored, "c", "blue anchor")  # in the row of the green boat
    assert set(restored.chunks("default", np.arange(9))) == set(catalog.chunks("default", np.arange(9)))
    third = open_words(restored, path)
    assert texts(restored, third, "boat") == ["red boat"]
    assert texts(restored, third, "anchor") == ["blue anchor"]
    restored.close()
