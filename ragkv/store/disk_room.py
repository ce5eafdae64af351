"""What a disk has left, and the part of it that KV leaves to the catalogue.

The catalogue is the truth and KV is a cache, so on a shared disk KV gives way: an entry is not stored where it would
take the reserve, and entries are removed when the catalogue needs it (`DiskStore.give_way`).
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

MOST_RESERVED = 8 * 2**20
"""Bytes: the write-ahead log of a catalogue, of 4 MiB before it is emptied, and as many pages in its file."""
SHARE = 16
"""Of a small disk one part in `SHARE` is reserved."""
FULL = {errno.ENOSPC, errno.EDQUOT}


class DiskRoom:
    """The room on the disk of a folder when this was made. Making it may raise OSError.

    Attributes:
        free: Bytes that may be written.
        reserved: Bytes of them that are the catalogue's.
    """

    def __init__(self, folder: Path):
        """Ask the disk, which takes a microsecond."""
        disk = os.statvfs(folder)
        self.free = disk.f_bavail * disk.f_frsize
        self.reserved = min(MOST_RESERVED, disk.f_blocks * disk.f_frsize // SHARE)

    def lacks(self, size: int) -> int:
        """Return the bytes to free before the catalogue writes `size` bytes; 0 where half of the reserve is left."""
        return 0 if self.free >= self.reserved // 2 + size else self.reserved + size - self.free


def refuses(folder: Path, size: int) -> bool:
    """Whether a disk does not take a file of so many bytes, as with a quota, which its free bytes do not show."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return error.errno in FULL
    return False


def on_one_disk(one: Path, other: Path) -> bool:
    """Whether two files lie on the same disk. False where that cannot be told."""
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return False
