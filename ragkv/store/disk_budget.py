"""The size limit of a folder of entries: the least recently used entries are removed when a new one does not fit.

The folder is not scanned for every write. A scan tells how many bytes are free, and later writes are subtracted in
memory. The next scan runs when these bytes are used up, or after a sixteenth of the limit has been written, whichever
comes first. So about sixteen files are scanned for each file written, however many there are. A scan that finds too
little room removes enough entries to free a sixteenth of the limit.

Processes may share a folder. Each counts its own writes, so together they exceed the limit by at most a sixteenth for
every further process that writes at the same time. Removal is safe at any time: a reader that has the file open keeps
reading, and a later reader misses and encodes the chunk again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ragkv.errors import StoreFull

SHARE = 16
"""A scan covers, and frees, at least one part in `SHARE` of the limit."""


class _File(NamedTuple):
    """A file of the folder. Tuples sort in the order of removal: expired files first, then by last use."""

    live: bool
    used: float
    size: int
    path: str


class DiskBudget:
    """Keeps a folder within its limit. Thread-safe. Any method may raise OSError."""

    def __init__(self, root: Path, limit: int, expired: Callable[[float], bool]):
        """Create the budget of a folder.

        Args:
            root: The folder.
            limit: Bytes that all entries may have; 0 for any number.
            expired: Tells whether a file that was last changed at a Unix time has expired.
        """
        self._root, self._limit, self._expired = root, limit, expired
        self._lock = threading.Lock()
        self._free = 0
        self._writing = 0

    @contextmanager
    def reserve(self, size: int, path: Path) -> Iterator[None]:
        """Reserve room for a file of `size` bytes while the block writes it to `path`.

        Raises:
            StoreFull: The file is larger than the limit, or too few other files can be removed.
        """
        if not self._limit:
            yield
            return
        if size > self._limit:
            raise StoreFull(
                f"an entry of {size} bytes does not fit into the store's {self._limit}; raise RAGKV_STORE_BYTES"
            )
        with self._lock:
            if size > self._free:
                self._free = self._make_room(size, os.fspath(path))
            self._free -= size
            self._writing += size
        try:
            yield
        finally:
            with self._lock:
                self._writing -= size

    def free(self, size: int) -> int:
        """Remove the least recently used files until they had `size` bytes. Returns how many bytes they had."""
        with self._lock:
            freed = self._remove(sorted(self._files()), size)
            self._free += freed
            return freed

    def _make_room(self, size: int, keep: str) -> int:
        """Scan the folder and remove files if necessary. Returns the bytes that may now be written."""
        share = max(size, self._limit // SHARE)
        # The file that is replaced is neither counted nor removed, because the rename removes it.
        files = [file for file in self._files() if file.path != keep]
        total = sum(file.size for file in files) + self._writing
        if total + size > self._limit:
            total -= self._remove(sorted(files), total + share - self._limit)
        if total + size > self._limit:
            raise StoreFull(f"{self._root} holds {total} of {self._limit} bytes, and nothing more can be removed")
        return min(share, self._limit - total)

    def _remove(self, files: Sequence[_File], size: int) -> int:
        """Remove files, the first ones first, until they had `size` bytes together. Returns how many bytes they had."""
        removed = 0
        for file in files:
            if removed >= size:
                break
            with suppress(PermissionError):
                with suppress(FileNotFoundError):
                    os.unlink(file.path)
                removed += file.size
        return removed

    def _files(self) -> Iterator[_File]:
        for folder in self._root.glob("??"):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith(".kv") and file.is_file():
                        with suppress(FileNotFoundError):
                            info = file.stat()
                            live = not self._expired(info.st_mtime)
                            used = max(info.st_atime, info.st_mtime)
                            yield _File(live, used, info.st_size, file.path)
