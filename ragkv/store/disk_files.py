"""Atomic file writes, and the temporary files of writers that died. Leases (disk_leases.py) are such files, too.

A writer holds a lock (flock) on its temporary file. A temporary file is abandoned if nobody holds its lock and it is
older than a minute. Without a lock its writer has died, in whatever process or container it ran. The minute covers the
moment between creating the file and locking it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

ABANDONED_AFTER = 60.0
"""Seconds."""


def write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file from its parts, atomically. It is on the disk when this returns.

    Raises:
        OSError: The file could not be written. A previous file is intact.
    """
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # On a file system without locks no file is ever considered abandoned.
            fcntl.flock(file, fcntl.LOCK_EX)
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest.nbytes:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(file)
    flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder of entries, if it is not there, and write its name to the disk."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def abandoned_files(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the temporary files of writers that died, and their sizes."""
    for path in root.glob("??/.*.tmp"):
        with suppress(OSError):
            info = path.stat()
            if time.time() - info.st_mtime < ABANDONED_AFTER:
                continue
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, info.st_size
            finally:
                os.close(file)
