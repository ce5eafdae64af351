"""A search misses what other processes changed for at most as long as the settings allow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.catalog import Catalog
from ragkv.retrieval import Retrieval, Retriever
from ragkv.retrieval.freshness import Freshness
from tests.ingest.reader import WordEmbedder
from tests.retrieval.writer import Writer, put

NEVER = 1e6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(path)
    yield opened
    opened.close()


@pytest.fixture
def other(catalog: Catalog, path: Path) -> Iterator[Writer]:
    writer = Writer(str(path))
    yield writer
    writer.stop()


def replica(catalog: Catalog, folder: Path, staleness: float) -> Retriever:
    return Retriever(catalog, WordEmbedder(), folder, Retrieval(staleness=staleness, own_words=True))


def found(retriever: Retriever, question: str) -> list[str]:
    return [hit.chunk.text for hit in retriever.search(question)]


def test_a_state_is_read_again_when_it_is_too_old(catalog: Catalog) -> None:
    now = [100.0]
    freshness = Freshness(catalog, 2.0, lambda: now[0])
    put(catalog, "a", "boat")
    first = freshness.state("default")
    put(catalog, "b", "mast")
    now[0] += 1.9
    assert freshness.state("default") == first
    now[0] += 0.1
    assert freshness.state("default").generation == catalog.generation("default") > first.generation


def test_without_staleness_every_search_reads_the_state(catalog: Catalog) -> None:
    freshness = Freshness(catalog, 0.0, lambda: 100.0)
    for name in "ab":
        put(catalog, name, "boat")
        assert freshness.state("default").generation == catalog.generation("default")


def test_a_confirmed_state_is_relied_on_for_longer_and_a_changed_one_is_read(catalog: Catalog) -> None:
    now = [100.0]
    freshness = Freshness(catalog, 2.0, lambda: now[0])
    put(catalog, "a", "boat")
    first = freshness.state("default")
    now[0] = 103.0
    assert freshness.confirm("default", first.generation, 102.5)
    assert freshness.state("default").read == 102.5
    put(catalog, "b", "mast")
    assert not freshness.confirm("default", catalog.generation("default"), 103.0)
    assert freshness.state("default").generation == catalog.generation("default")


def test_a_search_misses_a_new_document_only_while_its_views_may_be_stale(
    catalog: Catalog, other: Writer, tmp_path: Path
) -> None:
    put(catalog, "a", "red boat")
    stale, bounded, exact = (replica(catalog, tmp_path / str(s), s) for s in (NEVER, 0.5, 0.0))
    for retriever in (stale, bounded, exact):
        assert found(retriever, "boat") == ["red boat"]
    committed = other.put("b", "green boat")
    assert sorted(found(exact, "boat")) == ["green boat", "red boat"]
    time.sleep(max(0.0, committed + 0.5 - time.monotonic()))
    assert sorted(found(bounded, "boat")) == ["green boat", "red boat"]
    assert found(stale, "boat") == ["red boat"]


def test_a_removed_or_replaced_document_is_never_found_however_stale_the_views_are(
    catalog: Catalog, other: Writer, tmp_path: Path
) -> None:
    put(catalog, "a", "red boat")
    put(catalog, "b", "grey boat")
    retriever = replica(catalog, tmp_path / "index", NEVER)
    assert sorted(found(retriever, "boat")) == ["grey boat", "red boat"]
    other.put("a", "blue boat")
    assert sorted(found(retriever, "boat")) == ["blue boat", "grey boat"], (
        "the missing chunk shows that views are stale"
    )
    catalog.remove("default", "b")
    assert found(retriever, "boat") == ["blue boat"]


def test_a_process_that_follows_the_catalogue_finds_a_document_without_asking_for_the_state(
    catalog: Catalog, other: Writer, tmp_path: Path
) -> None:
    put(catalog, "a", "red boat")
    retriever = replica(catalog, tmp_path / "index", 1.0)
    retriever.views.start_follower()
    assert found(retriever, "boat") == ["red boat"]
    waits = []
    for number in range(5):
        committed = other.put("b", f"green boat {number}")
        while f"green boat {number}" not in found(retriever, f"green boat {number}"):
            assert time.monotonic() - committed < 10
        waits.append(time.monotonic() - committed)
    assert sorted(waits)[2] < 1.5
    for _ in range(200):
        status = retriever.views.status()
        assert status is not None
        if status.behind == 0 and status.age < 1:
            break
        time.sleep(0.05)
    assert (status.behind, status.refreshed > 0) == (0, True)
    retriever.close()


def test_following_loads_nothing_that_was_not_searched(catalog: Catalog, tmp_path: Path) -> None:
    put(catalog, "a", "red boat")
    put(catalog, "a", "blue boat", collection="ours")
    retriever = replica(catalog, tmp_path / "index", 0.1)
    retriever.views.start_follower()
    found(retriever, "boat")
    put(catalog, "b", "green boat", collection="ours")
    put(catalog, "b", "green boat")
    views, end = retriever.views, time.monotonic() + 10
    while views.vectors.generations() != {"default": catalog.generation("default")} and time.monotonic() < end:
        time.sleep(0.02)
    assert views.vectors.generations() == {"default": catalog.generation("default")}
    retriever.close()
    assert set(views.words.generations()) == {"default"}
