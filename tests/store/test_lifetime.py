"""The lifetime of entries: by age on both backends, and by last use if the disk store has a budget."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from ragkv.errors import ConfigError, EntryMissing, StoreFull
from ragkv.store import open_store
from ragkv.store.base import Range, StoreStats
from ragkv.store.disk_store import DiskStore
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
KEYS = [Key(f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" + "0" * 48) for number in range(400)]
"""Spread over the folders as hashes are."""
HEAD = b"h" * 100
FILE = 8192
"""Bytes of an entry's file: one page for preamble and head, one page of body."""


def put(store: DiskStore, key: Key) -> None:
    store.put(key, HEAD, [bytes(FILE - 4096)])


def path_of(store: DiskStore, key: Key) -> Path:
    return store.root / key[:2] / f"{key}.kv"


def age(store: DiskStore, key: Key, seconds: float) -> None:
    """Set the times of an entry back by so many seconds."""
    then = time.time() - seconds
    os.utime(path_of(store, key), (then, then))


def total(root: Path) -> int:
    """Return the bytes of all entries. Others may remove some meanwhile."""
    size = 0
    for path in root.glob("??/*.kv"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


# Age


def test_an_expired_entry_is_missing_and_is_swept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, ttl=100)
    for key in KEYS[:3]:
        put(store, key)
    age(store, KEYS[0], 101)
    age(store, KEYS[1], 90)
    for use in (store.head, store.layers, lambda key: store.read(key, [Range(0, 0, 1)], memoryview(bytearray(1)))):
        use(KEYS[1])
        with pytest.raises(EntryMissing, match="expired"):
            use(KEYS[0])
    assert set(store.keys()) == set(KEYS[1:3])
    assert store.stats().entries == 2
    assert store.sweep(dry_run=True).expired == StoreStats(1, FILE)
    assert path_of(store, KEYS[0]).exists()
    assert store.sweep(dry_run=False).expired == StoreStats(1, FILE)
    assert not path_of(store, KEYS[0]).exists()
    assert store.sweep(dry_run=False).expired == StoreStats(0, 0)


def test_a_read_does_not_renew_an_entry_and_a_write_does(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, ttl=100, limit=10 * FILE)
    put(store, KEYS[0])
    age(store, KEYS[0], 99)
    store.head(KEYS[0])
    assert time.time() - path_of(store, KEYS[0]).stat().st_mtime > 98
    put(store, KEYS[0])
    assert time.time() - path_of(store, KEYS[0]).stat().st_mtime < 50


def test_without_a_lifetime_nothing_expires(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    put(store, KEYS[0])
    os.utime(path_of(store, KEYS[0]), (0, 0))
    assert store.head(KEYS[0]) == HEAD
    assert store.sweep(dry_run=False).expired == StoreStats(0, 0)


def test_redis_expires_every_value_and_the_head_first(own: RedisServer) -> None:
    store, client = RedisStore(own.url, 5.0, ttl=0.15), redis.Redis.from_url(own.url)
    store.put(KEYS[0], HEAD, [b"one", b"two"])
    left = [client.pttl(f"ragkv:{{{KEYS[0]}}}:{name}") for name in ("head", "body:0", "body:1")]
    assert 0 < left[0] <= 150 < min(left[1:])
    assert store.head(KEYS[0]) == HEAD
    time.sleep(0.2)
    with pytest.raises(EntryMissing):
        store.head(KEYS[0])
    assert list(store.keys()) == []
    store.put(KEYS[0], HEAD, [b"one"])
    assert store.head(KEYS[0]) == HEAD
    time.sleep(1.3)
    assert client.dbsize() == 0, "every value has expired"


def test_an_entry_without_a_ttl_stays_in_redis(own: RedisServer) -> None:
    short, long = RedisStore(own.url, 5.0, ttl=100), RedisStore(own.url, 5.0)
    short.put(KEYS[0], HEAD, [b"one"])
    long.put(KEYS[0], HEAD, [b"one"])
    client = redis.Redis.from_url(own.url)
    assert [client.pttl(name) for name in client.scan_iter()] == [-1, -1]


# Budget


def test_the_least_recently_used_entries_are_removed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, limit=32 * FILE)
    for number, key in enumerate(KEYS[:32]):
        put(store, key)
        age(store, key, 1000 - number)
    for key in KEYS[:5]:
        store.head(key)
    put(store, KEYS[40])
    kept = set(store.keys())
    assert total(tmp_path) <= 32 * FILE
    assert kept >= {*KEYS[:5], KEYS[40]}
    assert not kept & {*KEYS[5:7]}, "used least recently"
    assert kept >= {*KEYS[8:32]}, "at most a sixteenth is removed at a time"


NOATIME = """
import os, sys, time
from pathlib import Path
from ragkv.store.disk_store import DiskStore
from tests.store.test_lifetime import FILE, KEYS, age, path_of, put

def used(key):
    return path_of(store, key).stat().st_atime

store = DiskStore(Path(sys.argv[1], "kv"), limit=16 * FILE)
for number, key in enumerate(KEYS[:16]):
    put(store, key)
    age(store, key, 1000 - number)
path_of(store, KEYS[0]).read_bytes()
store.layers(KEYS[0])
assert time.time() - used(KEYS[0]) > 900, "neither the mount nor layers() updates the access time"
store.head(KEYS[0])
updated = used(KEYS[0])
assert time.time() - updated < 10 and time.time() - path_of(store, KEYS[0]).stat().st_mtime > 900
store.head(KEYS[0])
assert used(KEYS[0]) == updated, "once a minute is enough"
DiskStore(store.root).head(KEYS[2])
assert time.time() - used(KEYS[2]) > 900, "without a budget it is not updated"
put(store, KEYS[20])
assert set(store.keys()) == {KEYS[0], *KEYS[2:16], KEYS[20]}
print("done")
"""


def test_the_access_time_is_updated_on_a_mount_that_does_not_keep_it(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o noatime none {tmp_path}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this kernel does not let us mount a disk")
    command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$0" -c "$1" {tmp_path}', sys.executable, NOATIME]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr


def test_expired_entries_are_removed_before_live_ones(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, ttl=100, limit=16 * FILE)
    for key in KEYS[:16]:
        put(store, key)
        age(store, key, 50)
    path = path_of(store, KEYS[9])
    os.utime(path, (time.time(), time.time() - 101))
    put(store, KEYS[20])
    assert not path.exists()
    assert set(store.keys()) == {*KEYS[:9], *KEYS[10:16], KEYS[20]}


def test_replacing_an_entry_does_not_remove_it_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, limit=FILE)
    for _ in range(3):
        put(store, KEYS[0])
        assert list(store.keys()) == [KEYS[0]]
    put(store, KEYS[1])
    assert list(store.keys()) == [KEYS[1]]


def test_an_entry_larger_than_the_budget_is_store_full_and_changes_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, limit=4 * FILE)
    for key in KEYS[:4]:
        put(store, key)
    with pytest.raises(StoreFull, match="RAGKV_STORE_BYTES"):
        store.put(KEYS[5], HEAD, [bytes(4 * FILE)])
    assert set(store.keys()) == set(KEYS[:4])


def test_a_reader_with_the_file_open_is_not_disturbed_by_its_eviction(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, limit=2 * FILE)
    store.put(KEYS[0], HEAD, [b"x" * 2000, b"y" * 2000])
    out = bytearray(4000)

    def meanwhile(number: int) -> None:
        if number == 0:
            for key in KEYS[1:5]:
                put(store, key)
            with pytest.raises(EntryMissing):
                store.head(KEYS[0])

    store.read(KEYS[0], [Range(0, 0, 2000), Range(1, 0, 2000)], memoryview(out), meanwhile)
    assert out == b"x" * 2000 + b"y" * 2000


def test_the_folder_is_not_scanned_for_every_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, limit=80 * FILE)
    scans, scandir = [0], os.scandir

    def counted(path: Path) -> object:
        scans[0] += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    for key in KEYS[:200]:
        put(store, key)
    folders = len(list(tmp_path.glob("??")))
    assert total(tmp_path) <= 80 * FILE
    assert scans[0] / folders <= 200 / (80 / 16) + 16, "one scan for each sixteenth of the limit"


def test_a_budget_that_is_set_later_holds_from_the_next_write_on(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for key in KEYS[:40]:
        put(store, key)
    put(DiskStore(tmp_path, limit=10 * FILE), KEYS[50])
    assert total(tmp_path) <= 10 * FILE


def test_threads_stay_within_the_budget_together(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, limit=20 * FILE)
    faults: list[Exception] = []
    totals: list[int] = []

    def write(part: int) -> None:
        try:
            for key in KEYS[part:160:4]:
                put(store, key)
                totals.append(total(tmp_path))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert max(totals) <= 20 * FILE
    assert min(totals[-50:]) > 10 * FILE, "not more is removed than necessary"


WRITE = """
import sys
from pathlib import Path
from ragkv.store.disk_store import DiskStore
from ragkv.types import Key

store, part = DiskStore(Path(sys.argv[1]), limit=int(sys.argv[2])), int(sys.argv[3])
for number in range(part, 600, 3):
    store.put(Key(f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" + "0" * 48), b"head", [bytes(4096)])
"""


def test_processes_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    limit = 64 * FILE
    command = [sys.executable, "-c", WRITE, str(tmp_path), str(limit)]
    writers = [subprocess.Popen([*command, str(part)], cwd=ROOT, stderr=subprocess.PIPE) for part in range(3)]
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, total(tmp_path))
    for writer in writers:
        _, faults = writer.communicate()
        assert writer.returncode == 0, faults
    # The folder changes while it is counted, so removed and new files may be counted together.
    assert most <= limit + 2 * limit // 16 + 4 * FILE, "the limit, and a sixteenth for each further writer"
    store = DiskStore(tmp_path, limit=limit)
    put(store, KEYS[0])
    assert limit // 2 < total(tmp_path) <= limit
    assert all(store.head(key) in (b"head", HEAD) for key in set(store.keys()))


def test_a_limit_for_redis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="maxmemory"):
        open_store("redis://localhost:6379/0", tmp_path, 0.25, limit=1000)
