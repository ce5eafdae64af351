"""Replicas that share a catalogue in PostgreSQL find what one process with a file finds, and soon after each change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.catalog import Catalog
from ragkv.errors import StoreUnavailable
from ragkv.retrieval import Retrieval, Retriever, SearchScope
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.word_index import ReplicaWords
from tests.ingest.reader import WordEmbedder
from tests.postgres_server import PostgresServer, postgres_server
from tests.retrieval.writer import Writer, put

pytestmark = pytest.mark.scale

DOCUMENTS = {
    "a": ("the red boat", "boats and anchors", "Zürich"),
    "b": ("a boat on the lake of Zurich", "an anchor"),
    "c": ("nothing of that kind",),
}
QUERIES = ("boat", "Which boats are on the lake?", "zurich anchor", "the", "“AND” OR (", "unknown")
SCOPES = (
    SearchScope(),
    SearchScope("default", {"year": 1}),
    SearchScope("default", {"year": [2, 3]}, ("a", "b")),
    SearchScope("default", None, ("c",)),
    SearchScope("theirs"),
)


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def catalog(address: str) -> Iterator[Catalog]:
    opened = Catalog.open(address)
    yield opened
    opened.close()


def replica(catalog: Catalog, folder: Path, staleness: float) -> Retriever:
    return Retriever(catalog, WordEmbedder(), folder, Retrieval(staleness=staleness))


def found(retriever: Retriever, question: str) -> list[str]:
    return [hit.chunk.text for hit in retriever.search(question, top_k=40)]


def test_words_rank_as_in_a_catalogue_with_a_word_index(catalog: Catalog, tmp_path: Path) -> None:
    file = Catalog.open(tmp_path / "catalog.sqlite")
    for each in (catalog, file):
        for number, (name, texts) in enumerate(DOCUMENTS.items()):
            put(each, name, *texts, year=number)
        put(each, "z", "their boat", collection="theirs")
        put(each, "c", "no boat", year=3)
    index = ReplicaWords(catalog, tmp_path / "words.sqlite", Freshness(catalog))
    for collection in ("default", "theirs"):
        index.refresh(collection)
    for scope in SCOPES:
        for query in QUERIES:
            ours = index.match(scope, query, 9)
            theirs = file.match(scope.collection, query, 9, scope.filter, scope.documents)
            assert _named(catalog, scope, ours) == _named(file, scope, theirs), (scope, query)
    index.close()
    file.close()


def _named(catalog: Catalog, scope: SearchScope, ranked: list[tuple[int, float]]) -> list[tuple[str, float]]:
    chunks = catalog.chunks(scope.collection, [row for row, _ in ranked])
    return [(chunks[row].id, score) for row, score in ranked]


def test_another_replica_finds_a_document_within_two_seconds(catalog: Catalog, address: str, tmp_path: Path) -> None:
    put(catalog, "a", "red boat")
    other, retriever = Writer(address), replica(catalog, tmp_path, 1.0)
    retriever.views.start_follower()
    assert found(retriever, "boat") == ["red boat"]
    waits = []
    for number in range(5):
        committed = other.put(f"b{number}", f"green boat {number}")
        while f"green boat {number}" not in found(retriever, f"green boat {number}"):
            assert time.monotonic() - committed < 20
        waits.append(time.monotonic() - committed)
    assert sorted(waits)[2] < 2
    other.stop()
    retriever.close()


def test_every_search_asks_where_no_staleness_is_allowed(catalog: Catalog, address: str, tmp_path: Path) -> None:
    other, retriever = Writer(address), replica(catalog, tmp_path, 0.0)
    for number in range(3):
        other.put(f"b{number}", f"green boat {number}")
        assert f"green boat {number}" in found(retriever, f"green boat {number}")
    other.stop()
    retriever.close()


def test_views_go_on_after_the_server_was_away(tmp_path: Path) -> None:
    with postgres_server() as server:
        catalog = Catalog.open(server.database())
        put(catalog, "a", "red boat")
        retriever = replica(catalog, tmp_path, 0.2)
        retriever.views.start_follower()
        assert found(retriever, "boat") == ["red boat"]
        server.stop()
        time.sleep(0.3)
        with pytest.raises(StoreUnavailable):
            retriever.search("boat")
        server.start()
        put(catalog, "b", "green boat")
        assert sorted(found(retriever, "boat")) == ["green boat", "red boat"]
        put(catalog, "c", "blue boat")
        end = time.monotonic() + 60
        while "blue boat" not in found(retriever, "boat"):
            assert time.monotonic() < end
        retriever.close()
        catalog.close()
