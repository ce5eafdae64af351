"""A tar of plain files that ends with a checksum of all of it. What is in it is backup.py's business.

    <mark>            the first member: says which program wrote this
    …                 members, in the GNU format, regular files only
    manifest.json     one JSON object, with the xxh3_128 of every byte before this member; then its own xxh3_128

Written and read member by member, with tarfile for the headers only: its own readers keep a record of every member in
memory, follow links, take what they do not understand for the end, and know nothing of taking a member back.
"""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ragkv.errors import InvalidBackup

MANIFEST = "manifest.json"
SLICE = 4 * 2**20
"""Bytes that are in memory at a time."""
_BLOCK = tarfile.BLOCKSIZE


class ArchiveWriter:
    """Writes members one after another, keeps the checksum of all of it, and can take the last ones back."""

    def __init__(self, file: BinaryIO):
        self._file, self._sum, self.written = file, xxhash.xxh3_128(), 0

    @contextmanager
    def member(self, name: str, size: int) -> Iterator[None]:
        """A member; its `size` bytes are written inside."""
        about = tarfile.TarInfo(name)
        about.size, about.mtime, about.mode = size, int(time.time()), 0o600
        self.write(about.tobuf(tarfile.GNU_FORMAT))
        end = self.written + size
        yield
        if self.written != end:
            raise ValueError(f"{name}: {size} bytes were announced, {self.written - end + size} written")
        self.write(bytes(-size % _BLOCK))

    def add(self, name: str, data: bytes) -> None:
        """A small member."""
        with self.member(name, len(data)):
            self.write(data)

    def write(self, data: bytes | bytearray) -> None:
        """The next bytes of the member."""
        self._file.write(data)
        self._sum.update(data)
        self.written += len(data)

    def mark(self) -> tuple[int, Any]:
        """A place to come `back` to."""
        return self.written, self._sum.copy()

    def back(self, mark: tuple[int, Any]) -> None:
        """Forget what was written since."""
        self.written, self._sum = mark
        self._file.seek(self.written)
        self._file.truncate()

    def end(self, manifest: dict[str, Any]) -> None:
        """The last member, and the end of the file."""
        body = json.dumps({**manifest, "checksum": self._sum.hexdigest()}).encode()
        self.add(MANIFEST, body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
        self.write(bytes(2 * _BLOCK))


class ArchiveReader:
    """An archive that is open for reading; `path` names it in what is raised."""

    def __init__(self, file: BinaryIO, path: Path, known: Callable[[str], bool]):
        """known: whether a name may be in it."""
        self._file, self._path, self._known = file, path, known

    def verify(self) -> dict[str, Any]:
        """Read every byte; returns the manifest. Raises InvalidBackup unless all are as they were written."""
        manifest: dict[str, Any] | None = None
        for name, start, size in self.members():
            if name == MANIFEST:
                manifest, end = self._manifest(self.part(start, size)), start - _BLOCK
        if manifest is None:
            raise InvalidBackup(f"{self._path} is cut off: its manifest is missing")
        state = xxhash.xxh3_128()
        for piece in self.pieces(0, end):
            state.update(piece)
        if state.hexdigest() != manifest.get("checksum"):
            raise InvalidBackup(f"{self._path} is damaged")
        return manifest

    def members(self) -> Iterator[tuple[str, int, int]]:
        """(name, where its bytes begin, how many they are) of every member. Raises InvalidBackup for anything else."""
        at, end = 0, os.fstat(self._file.fileno()).st_size
        while (header := self.part(at, _BLOCK)) != bytes(_BLOCK):
            try:
                about = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise InvalidBackup(f"{self._path} is damaged or cut off at byte {at}: {error}") from None
            at += _BLOCK
            if about.type != tarfile.REGTYPE or not (about.name == MANIFEST or self._known(about.name)):
                raise InvalidBackup(f"{self._path} holds {about.name[:100]!r}, which no backup holds")
            if not 0 <= about.size <= end - at:
                raise InvalidBackup(f"{self._path} is cut off inside {about.name}")
            yield about.name, at, about.size
            at += about.size + -about.size % _BLOCK

    def part(self, start: int, size: int) -> bytes:
        """These bytes of the file, fewer at its end."""
        self._file.seek(start)
        return self._file.read(size)

    def pieces(self, start: int, size: int) -> Iterator[bytes]:
        """The same, piece after piece."""
        while size > 0 and (piece := self.part(start, min(SLICE, size))):
            yield piece
            start, size = start + len(piece), size - len(piece)

    def _manifest(self, data: bytes) -> dict[str, Any]:
        body, _, checksum = data.partition(b"\n")
        if checksum.strip() != xxhash.xxh3_128_hexdigest(body).encode():
            raise InvalidBackup(f"{self._path} is damaged: its manifest is")
        manifest: dict[str, Any] = json.loads(body)
        return manifest


def starts_with(file: Path, mark: str, data: bytes) -> bool:
    """Whether the first member is `mark`, and its bytes begin with `data`."""
    with file.open("rb") as raw:
        start = raw.read(2 * _BLOCK)
    return start.startswith(mark.encode() + b"\0") and start[_BLOCK:].startswith(data)
