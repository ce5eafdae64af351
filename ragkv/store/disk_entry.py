"""The file of one entry of the disk store: its preamble, and reading it (disk_store.py)."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import xxhash

from ragkv.errors import EntryCorrupt
from ragkv.types import Key

MAGIC = b"ragkvfl\n"
VERSION = 1
PREAMBLE = struct.Struct("<8sIIQ")
CHECK = struct.Struct("<Q")
PAGE = 4096
MAX_LAYERS = 4096


@dataclass(frozen=True)
class StoredEntry:
    """An open file whose preamble is verified.

    Attributes:
        file: The file descriptor.
        head_start: First byte of the head.
        head_bytes: Bytes of the head.
        starts: First byte of each layer, and the end of the last one.
    """

    file: int
    head_start: int
    head_bytes: int
    starts: tuple[int, ...]


def preamble_of(head_bytes: int, layer_bytes: Sequence[int]) -> bytes:
    """Return the preamble of an entry, from the bytes of its head and of its layers."""
    data = PREAMBLE.pack(MAGIC, VERSION, len(layer_bytes), head_bytes) + struct.pack(
        f"<{len(layer_bytes)}Q", *layer_bytes
    )
    return data + CHECK.pack(xxhash.xxh3_64_intdigest(data))


def read_preamble(file: int, key: Key) -> StoredEntry:
    """Read the preamble. Raises EntryCorrupt unless it is whole and gives the exact size of the file."""
    data = os.pread(file, PAGE, 0)
    if len(data) < PREAMBLE.size:
        raise EntryCorrupt(f"{key} is cut off at {len(data)} bytes")
    magic, version, layers, head_bytes = PREAMBLE.unpack_from(data)
    if magic != MAGIC or version != VERSION or layers > MAX_LAYERS:
        raise EntryCorrupt(f"{key} is not an entry of version {VERSION}")
    end = PREAMBLE.size + 8 * layers
    if len(data) < end + CHECK.size:
        data = os.pread(file, end + CHECK.size, 0)
    if len(data) < end + CHECK.size or CHECK.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise EntryCorrupt(f"{key} has a damaged preamble")
    head_start = end + CHECK.size
    body_start = head_start + head_bytes + -(head_start + head_bytes) % PAGE
    starts = tuple(accumulate(struct.unpack_from(f"<{layers}Q", data, PREAMBLE.size), initial=body_start))
    if os.fstat(file).st_size != starts[-1]:
        raise EntryCorrupt(f"{key} has {os.fstat(file).st_size} bytes where {starts[-1]} belong")
    return StoredEntry(file, head_start, head_bytes, starts)


def read_into(file: int, out: memoryview, start: int, key: Key) -> None:
    """Fill `out` from byte `start` of a file on. Raises EntryCorrupt where the file ends before."""
    filled = 0
    while filled < out.nbytes:
        count = os.preadv(file, [out[filled:]], start + filled)
        if count == 0:
            raise EntryCorrupt(f"{key} ends at byte {start + filled}")
        filled += count
