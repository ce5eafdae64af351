"""The names and the frame of an entry in Redis, and commands that only look at entries.

An entry is several string values. The braces put them into one slot of a cluster.

    ragkv:{<key>}:head            frame (magic 4s, layers u32, bytes of the body u64, little-endian), then the head
    ragkv:{<key>}:body:<layer>    the body of one layer
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ragkv.errors import EntryCorrupt, StoreUnavailable
from ragkv.store.redis_link import ServerLink
from ragkv.store.redis_wire import Command
from ragkv.types import Key

FRAME = struct.Struct("<4sIQ")
MAGIC = b"rkv1"
KEY = re.compile(r"[0-9a-f]{64}")
MAX_LAYERS = 4096


@dataclass(frozen=True)
class RedisMemory:
    """What a server reports about its memory.

    Attributes:
        where: The server's address.
        used: Bytes in use.
        limit: Bytes it may use, 0 for no limit.
        policy: Its eviction policy.
    """

    where: str
    used: int
    limit: int
    policy: str


def head_name(key: Key) -> str:
    """Return the name of the head value. Raises ValueError for a malformed key."""
    if not KEY.fullmatch(key):
        raise ValueError(f"not a key: {key[:80]!r}")
    return f"ragkv:{{{key}}}:head"


def body_name(key: Key, layer: int) -> str:
    """Return the name of the value that holds one layer of the body."""
    return f"{head_name(key)[: -len('head')]}body:{layer}"


def pack_frame(layers: int, body_bytes: int) -> bytes:
    """Return the frame that precedes the head."""
    return FRAME.pack(MAGIC, layers, body_bytes)


def unpack_frame(data: bytes) -> tuple[int, int] | None:
    """Return the layers and body bytes of a frame, or None when `data` does not begin with a frame."""
    if len(data) < FRAME.size:
        return None
    magic, layers, size = FRAME.unpack_from(data)
    return (layers, size) if magic == MAGIC and layers <= MAX_LAYERS else None


def layer_count(link: ServerLink, key: Key) -> int | None:
    """Return the number of layers of a stored entry, or None when there is none.

    With a damaged frame, or with a value of another type in the place of the head, it is `MAX_LAYERS`.
    """
    try:
        data = link.command("GETRANGE", head_name(key), 0, FRAME.size - 1)
    except EntryCorrupt:
        return MAX_LAYERS
    if not data:
        return None
    frame = unpack_frame(data)
    return frame[0] if frame else MAX_LAYERS


def scan_keys(link: ServerLink) -> Iterator[Key]:
    """Return the keys of all entries on a server. SCAN walks its whole database."""
    cursor, keys = b"0", set[Key]()
    while True:
        cursor, names = link.command("SCAN", cursor, "MATCH", "ragkv:{*}:head", "COUNT", 1000)
        texts = (name.decode(errors="replace")[len("ragkv:{") : -len("}:head")] for name in names)
        keys.update(Key(text) for text in texts if KEY.fullmatch(text))
        if cursor == b"0":
            return iter(keys)


def entry_sizes(link: ServerLink, keys: Sequence[Key]) -> Iterator[int]:
    """Yield the bytes of those entries that are whole."""
    frames = _pipeline(link, [("GETRANGE", head_name(key), 0, FRAME.size - 1) for key in keys])
    entries = [(key, *frame) for key, data in zip(keys, frames, strict=True) if (frame := unpack_frame(data))]
    names = [(head_name(key), *(body_name(key, layer) for layer in range(layers))) for key, layers, _ in entries]
    lengths = iter(_pipeline(link, [("STRLEN", name) for entry in names for name in entry]))
    for _, layers, size in entries:
        head, *body = islice(lengths, layers + 1)
        if head and sum(body) == size:
            yield head - FRAME.size + size


def server_memory(link: ServerLink) -> RedisMemory:
    """Return what a server reports about its memory. Raises StoreUnavailable when it does not."""
    text = bytes(link.command("INFO", "memory")).decode(errors="replace")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        used, limit, policy = int(fields["used_memory"]), int(fields["maxmemory"]), fields["maxmemory_policy"]
    except (KeyError, ValueError):
        raise StoreUnavailable(f"Redis at {link.address} does not report its memory") from None
    return RedisMemory(link.address, used, limit, policy)


def _pipeline(link: ServerLink, commands: Sequence[Command]) -> list[Any]:
    return [link.checked(reply) for reply in link.pipeline(commands, link.deadline(0))]
