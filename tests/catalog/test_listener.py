"""A listener that may not wait still looks."""

from __future__ import annotations

import time

from ragkv.catalog import Catalog
from tests.catalog.test_catalog import put


def test_a_change_is_seen_without_waiting_for_one(catalog: Catalog) -> None:
    put(catalog, "a", ["text"])
    with catalog.listener() as listener:
        assert listener.wait(0) == {"default"}
        assert listener.wait(0) == frozenset()
        put(catalog, "a", ["text"], "other")
        until = time.monotonic() + 30  # PostgreSQL tells of it a moment later
        while not (changed := listener.wait(0)):
            assert time.monotonic() < until
        assert changed == {"other"}
