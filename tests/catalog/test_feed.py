"""The change feed says what is new and what is gone, and a listener wakes for changes of any process."""

from __future__ import annotations

import threading
import time

import numpy as np

from ragkv.catalog import Catalog
from tests.catalog.test_catalog import put


class Words:
    """A word index that knows only what the feed tells it."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.generation, self.rounds = 0, 0

    def refresh(self, catalog: Catalog, limit: int = 1000) -> None:
        while True:
            known = np.array(sorted(self.texts), np.int64)
            changes = catalog.passage_changes("default", known, self.generation, limit)
            self.generation, self.rounds = changes.generation, self.rounds + 1
            for row in changes.removed.tolist():
                del self.texts[row]
            self.texts |= {each.row: each.text for each in changes.added}
            if changes.complete:
                return


def test_the_feed_keeps_an_index_equal_to_the_catalogue(catalog: Catalog) -> None:
    index, empty = Words(), Words()
    empty.refresh(catalog)
    assert (empty.texts, empty.generation, empty.rounds) == ({}, 0, 1)
    put(catalog, "a", ["one", "two"])
    put(catalog, "b", ["three"])
    put(catalog, "c", ["other"], "other")
    index.refresh(catalog)
    assert sorted(index.texts.values()) == ["one", "three", "two"]
    put(catalog, "a", ["four"])
    catalog.remove("default", "b")
    index.refresh(catalog)
    assert (list(index.texts.values()), index.generation) == (["four"], catalog.generation("default"))
    catalog.clear("default")
    index.refresh(catalog)
    assert index.texts == {}


def test_the_feed_comes_in_pieces(catalog: Catalog) -> None:
    put(catalog, "a", [f"text {n}" for n in range(7)])
    index = Words()
    index.refresh(catalog, limit=3)
    assert (len(index.texts), index.rounds, index.generation) == (7, 3, catalog.generation("default"))


def test_a_listener_tells_first_of_all_collections_and_then_of_those_that_changed(catalog: Catalog) -> None:
    put(catalog, "a", ["one"])
    put(catalog, "a", ["one"], "other")
    with catalog.listener() as listener:
        assert listener.wait(0) == {"default", "other"}
        assert listener.wait(0.01) == frozenset()
        put(catalog, "b", ["two"], "other")
        assert listener.wait(5) == {"other"}


def test_a_waiting_listener_wakes_soon_after_a_change(catalog: Catalog) -> None:
    with catalog.listener() as listener:
        listener.wait(0)
        writer = threading.Timer(0.2, put, (catalog, "a", ["one"]))
        writer.start()
        began = time.monotonic()
        assert listener.wait(20) == {"default"}
        assert time.monotonic() - began < 10
        writer.join()


def test_a_listener_is_not_woken_by_changes_that_no_index_sees(catalog: Catalog) -> None:
    with catalog.listener() as listener:
        listener.wait(0)
        catalog.release(catalog.claim([], "model"))
        assert listener.wait(0.1) == frozenset()
