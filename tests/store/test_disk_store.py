"""The disk store under faults: a full disk, killed writers, files that disappear."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.errors import EntryCorrupt, EntryMissing, StoreUnavailable
from ragkv.store.base import Range, StoreStats, Swept
from ragkv.store.disk_entry import PAGE
from ragkv.store.disk_store import DiskStore
from ragkv.types import Key

ROOT = Path(__file__).resolve().parents[2]
KEYS = [Key(f"{number:064x}") for number in range(40)]
HEAD = b"h" * 500


def body(size: int = 3000, layers: int = 3) -> list[bytes]:
    return [bytes([layer]) * size for layer in range(layers)]


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


FILL = """
import resource, sys
from pathlib import Path
from ragkv.errors import StoreFull
from ragkv.store.disk_store import DiskStore
from ragkv.types import Key

root, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = DiskStore(root)
small, large = Key("a" * 64), Key("b" * 64)
store.put(small, b"head", [b"old"])
before = store.stats()
for key in (large, small):
    try:
        store.put(key, b"head", [bytes(600_000), bytes(600_000)])
        sys.exit("it was not full")
    except StoreFull as error:
        print(error)
assert store.stats() == before, store.stats()
assert store.head(small) == b"head"
assert [path.name for path in root.glob("*/*")] == [f"{small}.kv"], list(root.glob("*/*"))
store.put(large, b"head", [b"fits"])
assert store.stats().entries == 2
print("done")
"""


def test_a_file_over_the_allowed_size_is_store_full_and_changes_nothing(tmp_path: Path) -> None:
    done = child(FILL, tmp_path / "kv", 1_000_000)
    assert done.stdout.endswith("done\n"), done.stderr
    assert os.strerror(errno.EFBIG) in done.stdout


def test_a_full_disk_is_full_and_nothing_has_changed(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this kernel does not let us mount a small disk; the test above covers the same path")
    script = f'{mount} && exec "$0" -c "$1" {tmp_path}/kv 0'
    command = ["unshare", "-Urm", "sh", "-c", script, sys.executable, FILL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
    assert os.strerror(errno.ENOSPC) in done.stdout


CRASH = """
import os, signal, sys
from pathlib import Path
from ragkv.store.disk_store import DiskStore
from ragkv.types import Key

os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
DiskStore(Path(sys.argv[1])).put(Key("c" * 64), b"head", [bytes(5000)])
"""


def test_a_crash_between_write_and_rename_leaves_no_entry(tmp_path: Path) -> None:
    assert child(CRASH, tmp_path).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("*/*")
    assert left.stat().st_size > 5000

    store = DiskStore(tmp_path)
    assert list(store.keys()) == []
    with pytest.raises(EntryMissing):
        store.head(Key("c" * 64))
    store.put(KEYS[0], HEAD, body())
    assert left.exists(), "too young: it could belong to a writer that is still running"

    an_hour_ago = time.time() - 3600
    os.utime(left, (an_hour_ago, an_hour_ago))
    DiskStore(tmp_path).put(KEYS[0], HEAD, body())
    assert not left.exists()


def test_a_temporary_file_that_is_still_being_written_is_kept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body())
    busy = tmp_path / "00" / f".{KEYS[0]}.0123456789abcdef.tmp"
    with busy.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        os.utime(busy, (0, 0))
        DiskStore(tmp_path).put(KEYS[0], HEAD, body())
        assert busy.exists()
        assert store.sweep(dry_run=False) == Swept()
    busy.write_bytes(bytes(77))
    os.utime(busy, (0, 0))
    assert store.sweep(dry_run=True).temporary == StoreStats(1, 77)
    DiskStore(tmp_path).put(KEYS[0], HEAD, body())
    assert not busy.exists()
    assert store.stats().entries == 1


def test_an_entry_is_flushed_before_it_gets_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process loses nothing in the kernel's cache. Only the order of the calls protects from a power cut."""
    calls: list[str] = []
    flush, rename = os.fsync, os.rename

    def recording_fsync(file: int) -> None:
        flush(file)
        calls.append("flush " + ("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"))

    def recording_rename(old: Path, new: Path) -> None:
        rename(old, new)
        calls.append("rename")

    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body())
    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    store.put(KEYS[1], HEAD, body())
    assert calls == ["flush file", "rename", "flush folder"]


KILL = """
import os, signal, sys, time
from pathlib import Path
from ragkv.store.base import Range
from ragkv.store.disk_store import DiskStore
from ragkv.types import Key

store = DiskStore(Path(sys.argv[1]))

def write():
    for number in range(1_000_000):
        letter = bytes([number % 256])
        store.put(Key(f"{number % 40:064x}"), letter * 500, [letter * 30_000] * 3)

read = 0
for moment in range(25):
    writer = os.fork()
    if not writer:
        write()
    time.sleep(0.01 + 0.0017 * moment)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    for key in store.keys():
        out = bytearray(90_000)
        store.read(key, [Range(layer, 0, 30_000) for layer in range(3)], memoryview(out))
        assert set(out) == set(store.head(key)) and len(set(out)) == 1, key
        read += 1
print(read)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_entries(tmp_path: Path) -> None:
    done = child(KILL, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25


def test_a_reader_is_not_disturbed_by_a_delete(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body())
    with store._open(KEYS[0]) as entry:
        assert store.delete(KEYS[0])
        assert os.pread(entry.file, 3000, entry.starts[2]) == bytes([2]) * 3000
    with pytest.raises(EntryMissing):
        store.head(KEYS[0])


def test_the_body_starts_at_a_page(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for size in (0, 1, PAGE - 60, PAGE, 3 * PAGE + 1):
        store.put(KEYS[0], bytes(size), body())
        with store._open(KEYS[0]) as entry:
            assert entry.starts[0] % PAGE == 0
            assert entry.starts[0] - entry.head_start - size < PAGE


def bytes_read() -> tuple[int, int]:
    """Return the bytes that this thread has read so far, and the length of this report, which the next one counts."""
    file = os.open("/proc/thread-self/io", os.O_RDONLY)
    try:
        report = os.read(file, 4096)
    finally:
        os.close(file)
    return int(report.split()[1]), len(report)


def test_only_the_preamble_and_the_ranges_are_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body(size=100_000))
    ranges = [Range(0, 5, 1000), Range(1, 70_000, 30_000), Range(2, 99_999, 1)]
    out = memoryview(bytearray(31_001))
    before, report = bytes_read()
    store.read(KEYS[0], ranges, out)
    assert bytes_read()[0] - before - report == PAGE + 31_001


def test_a_file_of_another_kind_is_corrupt(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body())
    (file,) = tmp_path.glob("*/*.kv")
    whole = file.read_bytes()
    preamble = 24 + 3 * 8 + 8
    for at in range(preamble):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        with pytest.raises(EntryCorrupt):
            store.head(KEYS[0])
    for forged in (whole + b"\0", b"", bytes(PAGE), whole[:12] + b"\xff" * 12 + whole[24:]):
        file.write_bytes(forged)
        with pytest.raises(EntryCorrupt):
            store.read(KEYS[0], [Range(0, 0, 1)], memoryview(bytearray(1)))
    file.write_bytes(whole)
    assert store.head(KEYS[0]) == HEAD


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: (path / "inside").mkdir(parents=True)])
def test_what_is_no_file_in_the_place_of_an_entry_is_corrupt_and_can_be_replaced(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body())
    (file,) = tmp_path.glob("*/*.kv")
    file.unlink()
    make(file)
    with pytest.raises(EntryCorrupt):
        store.head(KEYS[0])
    assert store.delete(KEYS[0])
    store.put(KEYS[0], HEAD, body())
    assert store.head(KEYS[0]) == HEAD


def test_foreign_files_in_the_folder_are_not_entries(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEYS[0], HEAD, body())
    for name in ("README.kv", f"{'F' * 64}.kv", f"{KEYS[1]}.kv.bak"):
        (tmp_path / "00" / name).write_bytes(b"")
    assert list(store.keys()) == [KEYS[0]]
    assert store.stats() == StoreStats(1, 500 + 9000)


def test_a_folder_that_cannot_be_created_is_unavailable_when_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = DiskStore(tmp_path / "file" / "kv")
    for use in (
        store.ping,
        lambda: store.put(KEYS[0], HEAD, body()),
        lambda: store.head(KEYS[0]),
        lambda: store.delete(KEYS[0]),
    ):
        with pytest.raises(StoreUnavailable, match="file"):
            use()


def test_a_folder_that_disappears_is_unavailable_until_it_is_created_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv")
    store.put(KEYS[0], HEAD, body())
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(StoreUnavailable):
        store.ping()
    with pytest.raises(EntryMissing):
        store.head(KEYS[0])
    store.put(KEYS[0], HEAD, body())
    store.ping()
    assert store.head(KEYS[0]) == HEAD
