"""The disk store: one immutable file per entry, `<root>/<first two hex digits>/<key>.kv`.

    preamble magic 8s, version u32, layers u32, head length u64
    table    one u64 per layer: its length
    check    xxh3_64 of both, u64
    head
    (zeros up to a page boundary, so that the body can be mapped or read with direct I/O)
    body     layer after layer

All numbers are little-endian. A file is written under a temporary name in the same folder, flushed and renamed, and
then the folder is flushed. So after a crash there is the old entry, the new one, or none. Files are never changed in
place. Each call opens the file once, so a replaced or deleted entry does not disturb a reader.

Before it writes its first entry, a store removes the temporary files of writers that died (disk_files.py).

The modification time of a file says when the entry was written. With a `ttl` the entry is missing after that many
seconds, whether it was read or not. The access time says when it was last used. The store sets it, at most once a
minute, because mounts often do not (noatime, relatime). It is set only if there is a budget (disk_budget.py).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from ragkv.errors import EntryCorrupt, EntryMissing, StoreFull, StoreUnavailable
from ragkv.store.base import Arrived, Range, StoreStats, Swept, ignore
from ragkv.store.disk_budget import DiskBudget
from ragkv.store.disk_entry import MAX_LAYERS, PAGE, StoredEntry, preamble_of, read_into, read_preamble
from ragkv.store.disk_files import abandoned_files, make_folder, write_whole
from ragkv.store.disk_leases import DiskLeases
from ragkv.store.disk_room import FULL, DiskRoom, on_one_disk, refuses
from ragkv.types import Key

TOUCH_AFTER = 60.0
"""Seconds between two updates of an entry's access time."""
KEY = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


class DiskStore:
    """KVStore over a folder. Thread-safe. It keeps no file open, and several processes may share a folder.

    A folder that cannot be created or read raises StoreUnavailable when it is used, not when the store is created,
    because a fault of the cache must not prevent the service from starting.

    Attributes:
        root: The folder.
        leases: See KVStore.leases.
    """

    def __init__(self, root: Path, ttl: float = 0.0, limit: int = 0) -> None:
        """Create the store, and its folder if possible.

        Args:
            root: The folder.
            ttl: Seconds that an entry lives after it was written, 0 for no expiry.
            limit: Bytes that all files may have, 0 for no limit.
        """
        self.root, self._ttl = root, ttl
        self._limited, self._budget = limit > 0, DiskBudget(root, limit, self._expired)
        self._cleaned = False
        self.leases = DiskLeases(self._path, self._is_stored)
        with suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"DiskStore({str(self.root)!r})"

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore.put. The entry is on the disk, not only in the page cache, when this returns.

        If the budget is exceeded, the least recently used entries are removed first. The part of the disk that is
        reserved for the catalogue (disk_room.py) is not used.
        """
        path = self._path(key)
        if len(body) > MAX_LAYERS:
            raise ValueError(f"{len(body)} layers, at most {MAX_LAYERS} can be stored")
        preamble = preamble_of(len(head), [memoryview(layer).nbytes for layer in body])
        gap = -(len(preamble) + len(head)) % PAGE
        parts = [preamble, head, bytes(gap), *body]
        size = sum(memoryview(part).nbytes for part in parts)
        with _store_errors(f"writing {path}"), self._budget.reserve(size, path):
            if not self._cleaned:
                self._cleaned = True
                _count_files(abandoned_files(self.root), dry_run=False)
            make_folder(path.parent)
            room = DiskRoom(path.parent)
            if room.free - size < room.reserved:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_whole(path, parts)
        self.leases.end(key)

    def head(self, key: Key) -> bytes:
        """See KVStore.head."""
        with self._open(key) as entry:
            data = bytearray(entry.head_bytes)
            read_into(entry.file, memoryview(data), entry.head_start, key)
            if self._limited:
                _touch(entry.file)
            return bytes(data)

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore.read. Each range is one system call that reads into `out`."""
        if sum(part.size for part in ranges) != out.nbytes:
            raise ValueError(f"{out.nbytes} bytes to fill with ranges of {sum(part.size for part in ranges)} bytes")
        with self._open(key) as entry:
            filled = 0
            for number, part in enumerate(ranges):
                if not 0 <= part.layer < len(entry.starts) - 1:
                    raise EntryCorrupt(f"{key} has {len(entry.starts) - 1} layers, not {part.layer + 1}")
                start = entry.starts[part.layer] + part.offset
                if part.offset < 0 or part.size < 0 or start + part.size > entry.starts[part.layer + 1]:
                    raise EntryCorrupt(f"{key}: {part} lies outside its layer")
                read_into(entry.file, out[filled : filled + part.size], start, key)
                filled += part.size
                arrived(number)

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore.layers."""
        with self._open(key) as entry:
            return tuple(end - start for start, end in pairwise(entry.starts))

    def delete(self, key: Key) -> bool:
        """See KVStore.delete."""
        path = self._path(key)
        with _store_errors(f"deleting {path}"):
            try:
                _remove(path)
            except FileNotFoundError:
                return False
        return True

    def give_way(self, path: Path, size: int, full: bool) -> bool:
        """See KVStore.give_way. The least recently used entries are removed first."""
        with suppress(OSError):
            lacks = DiskRoom(path.parent).lacks(size)
            if not lacks and full and refuses(path.parent, size + PAGE):
                lacks = DiskRoom(path.parent).reserved + size
            if lacks and on_one_disk(self.root, path.parent):
                freed = self._budget.free(lacks)
                if freed:
                    logger.warning("KV of %d bytes was removed to make room for the catalogue", freed)
                return freed > 0
        return False

    def keys(self) -> Iterator[Key]:
        """See KVStore.keys. With a `ttl` it checks the age of every file."""
        with _store_errors(f"listing {self.root}"):
            files = [path for path in self.root.glob("??/*.kv") if KEY.fullmatch(path.stem)]
            expired = {path for path, _ in self._expired_files(files)} if self._ttl else set()
        return iter([Key(path.stem) for path in files if path not in expired])

    def stats(self) -> StoreStats:
        """See KVStore.stats. It opens every file, and does not count damaged ones."""
        entries = size = 0
        for key in self.keys():
            with suppress(EntryMissing, EntryCorrupt), self._open(key) as entry:
                entries += 1
                size += entry.head_bytes + entry.starts[-1] - entry.starts[0]
        return StoreStats(entries, size)

    def sweep(self, dry_run: bool) -> Swept:
        """See KVStore.sweep."""
        with _store_errors(f"sweeping {self.root}"):
            expired = self._expired_files(self.root.glob("??/*.kv")) if self._ttl else ()
            return Swept(_count_files(expired, dry_run), _count_files(abandoned_files(self.root), dry_run))

    def ping(self) -> None:
        """See KVStore.ping."""
        if not (self.root.is_dir() and os.access(self.root, os.R_OK | os.W_OK | os.X_OK)):
            raise StoreUnavailable(f"{self.root} is not a folder that can be read and written")

    def close(self) -> None:
        """See KVStore.close. No file is kept open."""

    def _expired(self, changed: float) -> bool:
        """Return whether a file that was last changed at this Unix time has expired."""
        return 0 < self._ttl < time.time() - changed

    def _expired_files(self, files: Iterable[Path]) -> Iterator[tuple[Path, int]]:
        """Yield the files that have expired, and their sizes."""
        for path in files:
            with suppress(FileNotFoundError):
                info = path.stat()
                if self._expired(info.st_mtime):
                    yield path, info.st_size

    def _is_stored(self, key: Key) -> bool:
        """Return whether there is an entry that has not expired."""
        try:
            info = self._path(key).stat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(info.st_mode) and not self._expired(info.st_mtime)

    def _path(self, key: Key) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"not a key: {key[:80]!r}")
        return self.root / key[:2] / f"{key}.kv"

    @contextmanager
    def _open(self, key: Key) -> Iterator[StoredEntry]:
        path = self._path(key)
        with _store_errors(f"reading {path}"):
            try:
                # Not to wait for a writer where a pipe stands in the place of an entry.
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise EntryMissing(f"{key} is not in {self.root}") from None
            try:
                if self._ttl and self._expired(os.fstat(file).st_mtime):
                    raise EntryMissing(f"{key} in {self.root} has expired")
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise EntryCorrupt(f"{path} is no file")
                yield read_preamble(file, key)
            finally:
                os.close(file)


@contextmanager
def _store_errors(action: str) -> Iterator[None]:
    """Replace OSError by StoreFull or StoreUnavailable."""
    try:
        yield
    except OSError as error:
        kind = StoreFull if error.errno in {*FULL, errno.EFBIG} else StoreUnavailable
        raise kind(f"{action}: {error.strerror or error}") from error


def _touch(file: int) -> None:
    """Update the access time, unless that was done lately: a question must not cost a write for every chunk."""
    info = os.fstat(file)
    if time.time() - info.st_atime > TOUCH_AFTER:
        with suppress(OSError):  # The file of another user: only the order of eviction becomes less exact.
            os.utime(file, ns=(time.time_ns(), info.st_mtime_ns))


def _remove(path: Path) -> None:
    """Remove an entry, and also a folder that stands in its place, which no rename would replace."""
    try:
        path.unlink()
    except (IsADirectoryError, PermissionError):
        if not path.is_dir():
            raise
        shutil.rmtree(path)


def _count_files(files: Iterable[tuple[Path, int]], dry_run: bool) -> StoreStats:
    """Count files and their bytes, and remove them unless `dry_run`."""
    count = total = 0
    for path, size in files:
        with suppress(FileNotFoundError):
            if not dry_run:
                _remove(path)
            count, total = count + 1, total + size
    return StoreStats(count, total)
