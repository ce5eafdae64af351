"""KV gives way to the catalogue on a disk that they share, and takes nothing of what is reserved for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragkv.errors import StoreFull
from ragkv.store import disk_room, disk_store
from ragkv.store.disk_room import DiskRoom
from ragkv.store.disk_store import DiskStore
from ragkv.types import Key

KEYS = [Key(digit * 64) for digit in "abc"]
PAGE = 4096
SIZE = 1000 * PAGE
"""Of the disk; 62 pages and a half are reserved."""


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """A store with three entries; the second is the one least recently used."""
    store = DiskStore(tmp_path / "kv")
    for key, used in zip(KEYS, (300, 100, 200), strict=True):
        store.put(key, b"head", [bytes(20 * PAGE)])
        os.utime(store._path(key), (used, used))
    return store


def leave(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Let every disk have so many free pages."""
    disk = SimpleNamespace(f_bavail=pages, f_frsize=PAGE, f_blocks=SIZE // PAGE)
    monkeypatch.setattr(disk_room.os, "statvfs", lambda path: disk)


def left(store: DiskStore) -> set[Key]:
    return set(store.keys())


def test_nothing_gives_way_where_there_is_room(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 32)
    assert not store.give_way(store.root.parent / "catalog", 0, full=False)
    assert left(store) == set(KEYS)


def test_the_least_recently_used_entries_give_way_first_and_no_more_than_needed(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 50)
    assert DiskRoom(store.root).lacks(20 * PAGE) > 20 * PAGE
    assert store.give_way(store.root.parent / "catalog", 20 * PAGE, full=False)
    assert left(store) == {KEYS[0]}


def test_an_entry_is_refused_where_it_would_take_what_is_reserved(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 70)
    with pytest.raises(StoreFull, match=os.strerror(errno.ENOSPC)):
        store.put(Key("d" * 64), b"head", [bytes(20 * PAGE)])
    assert left(store) == set(KEYS)
    leave(monkeypatch, 90)
    store.put(Key("d" * 64), b"head", [bytes(20 * PAGE)])


def test_a_disk_that_refuses_a_write_in_spite_of_free_bytes_is_full(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 900)
    assert not store.give_way(store.root.parent / "catalog", 0, full=True), "it takes a file"

    def over_quota(file: int, start: int, size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(disk_room.os, "posix_fallocate", over_quota)
    assert store.give_way(store.root.parent / "catalog", 0, full=True)
    assert left(store) == set()


def test_kv_on_another_disk_stays(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 0)
    monkeypatch.setattr(disk_store, "on_one_disk", lambda one, other: False)
    assert not store.give_way(store.root.parent / "catalog", 0, full=True)
    assert left(store) == set(KEYS)
