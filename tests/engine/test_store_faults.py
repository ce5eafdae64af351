"""Faults of the store are counted, logged once in a while for each kind, and told as the store's health."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import pytest

from ragkv.engine import store_faults
from ragkv.engine.store_faults import LOG_SECONDS, RECENT_SECONDS, StoreFaults
from ragkv.errors import EntryCorrupt, EntryMissing, StoreFull, StoreUnavailable
from ragkv.store.disk_store import DiskStore


class Clock:
    """A clock that stands still until it is moved."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_faults, "time", clock)
    return clock


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    (tmp_path / "kv").mkdir()
    return DiskStore(tmp_path / "kv")


def test_a_line_names_kind_counts_and_the_latest_error(
    clock: Clock, store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    faults = StoreFaults()
    with caplog.at_level(logging.WARNING, "ragkv"):
        for number in range(36):
            faults.unreadable(StoreUnavailable(f"redis at 10.0.0.1: try {number}"))
        faults.unreadable(EntryMissing("gone"))
        first, second = (record.getMessage() for record in caplog.records)
        assert "unavailable, 1 new, 1 since the start; the latest: redis at 10.0.0.1: try 0" in first
        assert "missing, 1 new" in second
        clock.now += LOG_SECONDS
        faults.health(store)  # nothing new happened, but 35 faults are not logged yet
        assert "unavailable, 35 new, 36 since the start" in caplog.records[-1].getMessage()
        clock.now += LOG_SECONDS
        faults.health(store)
    assert len(caplog.records) == 3
    assert (faults.counts, faults.refused) == ({"unavailable": 36, "missing": 1}, 0)


def test_a_full_store_is_told_until_a_write_succeeds(clock: Clock, store: DiskStore) -> None:
    faults = StoreFaults()
    faults.refusal(StoreFull("writing /srv/kv/00: No space left on device"))
    clock.now += 1000
    assert faults.health(store).startswith("full: the latest write was refused, 1 since the start")
    assert "/srv" not in faults.health(store)
    faults.stored()
    assert faults.health(store) == "ok"


def test_a_store_that_refused_a_change_is_asked_whether_it_takes_one(clock: Clock, tmp_path: Path) -> None:
    class ReadOnly(DiskStore):
        """Answers, and refuses to delete."""

        refuses = True

        def delete(self, key):
            if self.refuses:
                raise StoreUnavailable("READONLY")
            return super().delete(key)

    (tmp_path / "kv").mkdir()
    store, faults = ReadOnly(tmp_path / "kv"), StoreFaults()
    assert faults.health(store) == "ok", "nobody asks before something was refused"
    faults.refusal(StoreUnavailable("READONLY"))
    assert faults.health(store).startswith("unavailable: ")
    store.refuses = False
    assert faults.health(store) == "ok"


def test_damage_is_told_for_a_minute_and_missing_entries_are_not(clock: Clock, store: DiskStore) -> None:
    faults = StoreFaults()
    faults.unreadable(EntryMissing("evicted"))
    assert faults.health(store) == "ok", "eviction is what a cache does"
    faults.unreadable(EntryCorrupt("/srv/kv/00: a checksum differs"))
    assert faults.health(store).startswith("corrupt: 1 damaged entries since the start")
    clock.now += RECENT_SECONDS
    assert faults.health(store) == "ok"


def test_a_store_that_does_not_answer_is_told(store: DiskStore) -> None:
    store.root.rmdir()
    health = StoreFaults().health(store)
    assert health.startswith("unavailable: ")
    assert str(store.root) not in health


def test_a_fault_does_not_keep_the_request_alive_that_met_it(clock: Clock) -> None:
    """A traceback refers to the frames of the request, and these to its context cache."""

    class Cache:
        """What a request holds."""

    def ask(faults: StoreFaults) -> weakref.ref[Cache]:
        cache = Cache()
        try:
            raise EntryMissing("evicted")
        except EntryMissing as error:
            faults.unreadable(error)
        return weakref.ref(cache)

    faults = StoreFaults()
    assert ask(faults)() is None
    assert faults.counts == {"missing": 1}
