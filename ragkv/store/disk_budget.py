"""How large a folder of entries may grow: the least recently used go when a new one does not fit.

Nobody looks at every file for every entry. A look at the folder says how many bytes are free; what is written since is
taken off in memory, and the next look comes when that is used up, or after a sixteenth of the limit, whichever is less:
about sixteen files are looked at for each one written, however many there are. A look that finds too little room makes
a sixteenth of it.

Processes may share a folder. Each counts what it writes itself, so together they stay within the limit and a sixteenth
for every further process that writes at the same moment. Removing is safe at any time: who has the file open goes on
reading, who comes later misses and encodes again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ragkv.errors import StoreFull

SHARE = 16
"""A look is taken, and room is made, for at least this part of the limit."""


class _File(NamedTuple):
    """In the order in which they go: expired ones first, then by last use."""

    wanted: bool
    used: float
    size: int
    path: str


class Budget:
    """Thread-safe. Any method may raise OSError."""

    def __init__(self, root: Path, limit: int, expired: Callable[[float], bool]):
        """limit: bytes of all entries · expired: whether a file last changed at that Unix second is past its time."""
        self._root, self._limit, self._expired = root, limit, expired
        self._lock = threading.Lock()
        self._free = 0
        self._writing = 0

    @contextmanager
    def room(self, size: int, path: Path) -> Iterator[None]:
        """Room for a file of `size` bytes while it is written to `path`, and from then on.

        Raises StoreFull when it is larger than the limit, or the files of others cannot be removed.
        """
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

    def _make_room(self, size: int, keep: str) -> int:
        """Look, and remove what has to go. Returns the bytes that may now be written."""
        share = max(size, self._limit // SHARE)
        # What the new file replaces is neither counted nor removed: it goes when the new one is whole.
        files = [file for file in self._files() if file.path != keep]
        total = sum(file.size for file in files) + self._writing
        if total + size > self._limit:
            for file in sorted(files):
                if total + share <= self._limit:
                    break
                with suppress(PermissionError):
                    with suppress(FileNotFoundError):
                        os.unlink(file.path)
                    total -= file.size
        if total + size > self._limit:
            raise StoreFull(f"{self._root} holds {total} of {self._limit} bytes, and nothing more can be removed")
        return min(share, self._limit - total)

    def _files(self) -> Iterator[_File]:
        for folder in self._root.glob("??"):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
                for file in found:
                    if file.name.endswith(".kv"):
                        with suppress(FileNotFoundError):
                            about = file.stat()
                            wanted = not self._expired(about.st_mtime)
                            used = max(about.st_atime, about.st_mtime)
                            yield _File(wanted, used, about.st_size, file.path)
