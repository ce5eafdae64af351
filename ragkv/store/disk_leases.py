"""Leases in a folder, so that several processes that share it encode an entry once.

    <root>/<first two hex digits>/.<key>.lease.tmp        "<end> <owner>" and a newline, end: Unix time

The file is read and changed under its lock (flock), which is held for that moment only. Who finds the lock taken
takes the lease for held. A file is removed under its lock, too; who gets the lock of a removed file opens the file
again. The file of an owner that died counts until its end, and is swept with other temporary files (disk_files.py).

A file system without locks has no leases: `take` raises StoreUnavailable.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragkv.errors import StoreUnavailable
from ragkv.store.base import LeaseState
from ragkv.store.disk_files import make_folder
from ragkv.types import Key

MOST_BYTES = 1024
"""Longest content of a lease's file."""


class DiskLeases:
    """Leases of the entries of one folder. Thread-safe."""

    def __init__(self, path_of: Callable[[Key], Path], is_stored: Callable[[Key], bool]) -> None:
        """Create the leases of a folder.

        Args:
            path_of: Returns the path of an entry. It raises ValueError for a malformed key.
            is_stored: Tells whether an entry is there.
        """
        self._path_of, self._is_stored = path_of, is_stored

    def take(self, key: Key, owner: str, seconds: float) -> LeaseState:
        """See Leases.take."""
        path = self._path(key)
        with _lease_errors(path):
            make_folder(path.parent)
            with _locked(path, os.O_CREAT) as file:
                if self._is_stored(key):
                    if file is not None and not _owner(file):
                        path.unlink()
                    return "stored"
                if file is None or _owner(file):
                    return "held"
                _write(file, owner, seconds)
                return "taken"

    def renew(self, key: Key, owner: str, seconds: float) -> bool:
        """See Leases.renew."""
        path = self._path(key)
        with _lease_errors(path), _locked(path) as file:
            if file is None or _owner(file) != owner:
                return False
            _write(file, owner, seconds)
            return True

    def release(self, key: Key, owner: str) -> None:
        """See Leases.release."""
        path = self._path(key)
        with _lease_errors(path), _locked(path) as file:
            if file is not None and _owner(file) == owner:
                path.unlink()

    def end(self, key: Key) -> None:
        """End the lease of an entry, whoever has it."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: Key) -> Path:
        return self._path_of(key).with_name(f".{key}.lease.tmp")


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[int | None]:
    """Open and lock the file of a lease. None: it is locked, or not there."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except FileNotFoundError:
            yield None
            return
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            if os.fstat(file).st_nlink:
                yield file
                return
        finally:
            os.close(file)


@contextmanager
def _lease_errors(path: Path) -> Iterator[None]:
    """Replace OSError by StoreUnavailable."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the lease {path}: {error.strerror or error}") from error


def _owner(file: int) -> str:
    """Return the owner of a lease, "" where the file has none whose time has not passed."""
    line = os.pread(file, MOST_BYTES, 0).partition(b"\n")[0].decode(errors="replace")
    end, _, owner = line.partition(" ")
    try:
        return owner if float(end) > time.time() else ""
    except ValueError:
        return ""


def _write(file: int, owner: str, seconds: float) -> None:
    """Write the lease over the one before, whose rest stays behind the newline.

    The file is not truncated: file systems such as ext4 flush a file that is truncated and written again.
    """
    os.pwrite(file, f"{time.time() + seconds} {owner}\n".encode(), 0)
