"""Files that are there whole or not at all, and what a writer that died leaves of one.

A writer holds a lock (flock) on its temporary file. One that nobody holds and that is older than a minute is left
behind: the first says that its writer died, in whichever process or container; the second covers the moment between
creating the file and locking it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

LEFT_BEHIND_AFTER = 60.0


def write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """All parts become the file `path`, or nothing does. They are on the disk when this returns. Raises OSError."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # Where a file system has no locks, nothing is ever taken for left behind.
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


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def left_behind(root: Path) -> Iterator[tuple[Path, int]]:
    """Temporary files of writers that died (see the top), and their sizes."""
    for path in root.glob("??/.*.tmp"):
        with suppress(OSError):
            about = path.stat()
            if time.time() - about.st_mtime < LEFT_BEHIND_AFTER:
                continue
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, about.st_size
            finally:
                os.close(file)
