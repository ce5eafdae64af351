"""A tar archive of regular files that ends with a checksum of its contents. backup.py defines the members.

    <mark>            the first member; identifies the program that wrote the archive
    …                 members in the GNU format, regular files only
    manifest.json     one JSON object with the xxh3_128 of every byte before this member, then its own xxh3_128

Archives are written and read one member at a time. Only the headers are handled by tarfile: its own readers keep a
record of every member in memory, follow links and treat an invalid header as the end, and its writer cannot take back a
member.
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
"""Largest number of bytes that are in memory at a time."""
_BLOCK = tarfile.BLOCKSIZE


class ArchiveWriter:
    """Writes an archive member by member, updates its checksum, and can take back the latest members.

    Attributes:
        written: Number of bytes written so far.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._checksum, self.written = file, xxhash.xxh3_128(), 0

    @contextmanager
    def member(self, name: str, size: int) -> Iterator[None]:
        """Write a member; the caller writes its `size` bytes inside the block."""
        header = tarfile.TarInfo(name)
        header.size, header.mtime, header.mode = size, int(time.time()), 0o600
        self.write(header.tobuf(tarfile.GNU_FORMAT))
        end = self.written + size
        yield
        if self.written != end:
            raise ValueError(f"{name}: {size} bytes were announced, {self.written - end + size} written")
        self.write(bytes(-size % _BLOCK))

    def add(self, name: str, data: bytes) -> None:
        """Write a small member."""
        with self.member(name, len(data)):
            self.write(data)

    def write(self, data: bytes | bytearray) -> None:
        """Write the next bytes of the open member."""
        self._file.write(data)
        self._checksum.update(data)
        self.written += len(data)

    def mark(self) -> tuple[int, Any]:
        """Return the present position, for `rewind`."""
        return self.written, self._checksum.copy()

    def rewind(self, mark: tuple[int, Any]) -> None:
        """Discard everything written since `mark`."""
        self.written, self._checksum = mark
        self._file.seek(self.written)
        self._file.truncate()

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and the end of the archive."""
        body = json.dumps({**manifest, "checksum": self._checksum.hexdigest()}).encode()
        self.add(MANIFEST, body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
        self.write(bytes(2 * _BLOCK))


class ArchiveReader:
    """Reads an archive. Its error messages name `path`."""

    def __init__(self, file: BinaryIO, path: Path, known: Callable[[str], bool]):
        """Create a reader.

        Args:
            file: The open archive.
            path: Its path, for error messages.
            known: Returns whether an archive may contain a member of this name.
        """
        self._file, self._path, self._known = file, path, known

    def verify(self) -> dict[str, Any]:
        """Verify the checksum of the whole archive and return the manifest. Raises InvalidBackup."""
        manifest: dict[str, Any] | None = None
        for name, start, size in self.members():
            if name == MANIFEST:
                manifest, end = self._manifest(self.part(start, size)), start - _BLOCK
        if manifest is None:
            raise InvalidBackup(f"{self._path} is cut off: its manifest is missing")
        checksum = xxhash.xxh3_128()
        for piece in self.pieces(0, end):
            checksum.update(piece)
        if checksum.hexdigest() != manifest.get("checksum"):
            raise InvalidBackup(f"{self._path} is damaged")
        return manifest

    def members(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, offset, size) of every member. Raises InvalidBackup for anything but known regular files."""
        offset, end = 0, os.fstat(self._file.fileno()).st_size
        while (block := self.part(offset, _BLOCK)) != bytes(_BLOCK):
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise InvalidBackup(f"{self._path} is damaged or cut off at byte {offset}: {error}") from None
            offset += _BLOCK
            if header.type != tarfile.REGTYPE or not (header.name == MANIFEST or self._known(header.name)):
                raise InvalidBackup(f"{self._path} holds {header.name[:100]!r}, which no backup holds")
            if not 0 <= header.size <= end - offset:
                raise InvalidBackup(f"{self._path} is cut off inside {header.name}")
            yield header.name, offset, header.size
            offset += header.size + -header.size % _BLOCK

    def part(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the file from offset `start`; fewer at its end."""
        self._file.seek(start)
        return self._file.read(size)

    def pieces(self, start: int, size: int) -> Iterator[bytes]:
        """Yield the same bytes in pieces of at most SLICE."""
        while size > 0 and (piece := self.part(start, min(SLICE, size))):
            yield piece
            start, size = start + len(piece), size - len(piece)

    def _manifest(self, data: bytes) -> dict[str, Any]:
        body, _, checksum = data.partition(b"\n")
        if checksum.strip() != xxhash.xxh3_128_hexdigest(body).encode():
            raise InvalidBackup(f"{self._path} is damaged: its manifest has a wrong checksum")
        manifest: dict[str, Any] = json.loads(body)
        return manifest


def starts_with(file: Path, mark: str, data: bytes) -> bool:
    """Return whether the first member is named `mark` and its contents start with `data`."""
    with file.open("rb") as raw:
        beginning = raw.read(2 * _BLOCK)
    return beginning.startswith(mark.encode() + b"\0") and beginning[_BLOCK:].startswith(data)
