"""The Redis store. Per entry, plain string values, in one slot of a cluster thanks to the braces:

    ragkv:{<key>}:head            frame (magic 4s · layers u32 · bytes of the body u64, little-endian), then the head
    ragkv:{<key>}:body:<layer>    the body of one layer

Reads are GETRANGE, so only wanted bytes leave the server, and the kernel writes them where they belong (bulk.py). A
read of several requests that meets a writer may mix old bytes and new; two writers of one key write the same chunk, and
where they do not, the block checksums of the head tell (codec.py).

An entry is written in one transaction, so that no reader sees a head without its body. The server holds the queued
values as the values they will be, so it needs room for the old entry and the new one, as every atomic swap does, and no
more; the client sends them from where they lie. A transaction that is cut off, or refused halfway, changes nothing.

Eviction: `noeviction` is full with StoreFull; under `allkeys-lru` an entry that has lost a part is EntryMissing.

Expiry: with a `ttl` the values are set to expire, the head a second before the body, so that who has read the head
finds the body. Reading renews nothing: it would cost a command for every value, and the bound on the age would be none.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ragkv.errors import EntryCorrupt, EntryMissing, StoreError, StoreUnavailable
from ragkv.store.base import Arrived, Range, StoreStats, Swept, ignore
from ragkv.store.redis_bulk import BulkReader, OddReply
from ragkv.store.redis_link import ServerLink
from ragkv.store.redis_wire import Command, ServerRefusal
from ragkv.types import Key

FRAME = struct.Struct("<4sIQ")
MAGIC = b"rkv1"
KEY = re.compile(r"[0-9a-f]{64}")
MAX_LAYERS = 4096
BATCH = 64
HEAD_BYTES = 4 * 2**20
"""Time is allowed for a head of this size; its true size is known only when it is there."""


@dataclass(frozen=True)
class RedisMemory:
    """What a server says of its memory. where: its address · used, limit: bytes; 0: no limit · policy: what goes
    when it is full."""

    where: str
    used: int
    limit: int
    policy: str


class RedisStore:
    """KVStore over one Redis server. Thread-safe. See link.py for what it does about a server that is down or hangs."""

    def __init__(self, url: str, timeout: float, ttl: float | None = None) -> None:
        """`timeout`, `ttl` in seconds. The server need not answer yet. Raises ConfigError when the URL is malformed."""
        self.link = ServerLink(url, timeout)
        self._bulk = BulkReader(self.link)
        # Milliseconds, at least one: Redis refuses an expiry of 0.
        self._head_expiry: tuple[Any, ...] = ("PX", max(1, round(1000 * ttl))) if ttl else ()
        self._body_expiry: tuple[Any, ...] = ("PX", max(1, round(1000 * ttl)) + 1000) if ttl else ()

    def __repr__(self) -> str:
        return f"RedisStore({self.link.where!r})"

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore.put. One transaction; when it is refused nothing has changed."""
        if len(body) > MAX_LAYERS:
            raise ValueError(f"{len(body)} layers, at most {MAX_LAYERS} can be stored")
        size = sum(memoryview(layer).nbytes for layer in body)
        surplus = [_body(key, layer) for layer in range(len(body), self._layers(key) or 0)]
        commands: list[Command] = [("MULTI",)]
        commands += [("UNLINK", *surplus)] if surplus else []
        commands += [("SET", _body(key, layer), data, *self._body_expiry) for layer, data in enumerate(body)]
        commands += [("SET", _head(key), FRAME.pack(MAGIC, len(body), size) + head, *self._head_expiry), ("EXEC",)]
        # The first refusal is the reason why EXEC was refused.
        for reply in self.link.exchange(commands, self.link.deadline(len(head) + size)):
            for one in reply if isinstance(reply, list) else [reply]:
                self.link.accepted(one)

    def head(self, key: Key) -> bytes:
        """See KVStore.head."""
        data = self.link.ask("GET", _head(key), size=HEAD_BYTES)
        if data is None:
            raise EntryMissing(f"{key} is not in {self.link.where}")
        if _frame(data) is None:
            raise EntryCorrupt(f"{key} has a damaged frame")
        return bytes(memoryview(data)[FRAME.size :])

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore.read. `arrived` may be called in other threads, but not in two at once for one range."""
        total = sum(part.size for part in ranges)
        if total != out.nbytes:
            raise ValueError(f"{out.nbytes} bytes to fill with ranges of {total} bytes")
        for part in ranges:
            if part.layer < 0 or part.offset < 0 or part.size < 0:
                raise EntryCorrupt(f"{key}: {part} lies outside its layer")
        try:
            self._bulk.read([_body(key, part.layer) for part in ranges], ranges, out, arrived)
        except OddReply as odd:
            if isinstance(odd.reply, ServerRefusal):
                self.link.accepted(odd.reply)
            number, _, start, size, _ = odd.piece
            raise self._why_short(key, ranges[number].layer, start + size) from None

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore.layers. One command a layer."""
        count = self._layers(key)
        if count is None:
            raise EntryMissing(f"{key} is not in {self.link.where}")
        sizes = tuple(self.link.ask("STRLEN", _body(key, layer)) for layer in range(min(count, MAX_LAYERS)))
        if not all(sizes):
            raise EntryMissing(f"{key} has lost a layer in {self.link.where}")
        return sizes

    def delete(self, key: Key) -> bool:
        """See KVStore.delete. One command, so the entry goes whole."""
        layers = self._layers(key)
        if layers is None:
            return False
        return bool(self.link.ask("UNLINK", _head(key), *(_body(key, layer) for layer in range(layers))))

    def keys(self) -> Iterator[Key]:
        """See KVStore.keys. Walks all keys of the database, with SCAN."""
        cursor, found = b"0", set[Key]()
        while True:
            cursor, names = self.link.ask("SCAN", cursor, "MATCH", "ragkv:{*}:head", "COUNT", 1000)
            keys = (name.decode(errors="replace")[len("ragkv:{") : -len("}:head")] for name in names)
            found.update(Key(key) for key in keys if KEY.fullmatch(key))
            if cursor == b"0":
                return iter(found)

    def stats(self) -> StoreStats:
        """See KVStore.stats. Asks for the length of every value: linear in entries.

        An entry that has lost a part is not counted.
        """
        keys = list(self.keys())
        batches = (keys[start : start + BATCH] for start in range(0, len(keys), BATCH))
        sizes = [size for batch in batches for size in self._sizes(batch)]
        return StoreStats(len(sizes), sum(sizes))

    def sweep(self, dry_run: bool) -> Swept:
        """See KVStore.sweep. Nothing: the server expires by itself, and a transaction leaves no half of an entry."""
        return Swept()

    def ping(self) -> None:
        """See KVStore.ping. Fails at once for a second after a failure, as every call does."""
        self.link.ask("PING")

    def memory(self) -> tuple[RedisMemory, ...]:
        """Of the server. Raises StoreUnavailable when it does not answer, or does not tell."""
        told = bytes(self.link.ask("INFO", "memory")).decode(errors="replace")
        found = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
        try:
            used, limit, policy = int(found["used_memory"]), int(found["maxmemory"]), found["maxmemory_policy"]
        except (KeyError, ValueError):
            raise StoreUnavailable(f"Redis at {self.link.where} does not tell about its memory") from None
        return (RedisMemory(self.link.where, used, limit, policy),)

    def close(self) -> None:
        """See KVStore.close."""
        self._bulk.close()
        self.link.close()

    def _layers(self, key: Key) -> int | None:
        """Layers of the stored entry; None when there is none. With a damaged frame, or a value of another type in the
        place of the head: as many as there could be."""
        try:
            data = self.link.ask("GETRANGE", _head(key), 0, FRAME.size - 1)
        except EntryCorrupt:
            return MAX_LAYERS
        if not data:
            return None
        frame = _frame(data)
        return frame[0] if frame else MAX_LAYERS

    def _sizes(self, keys: Sequence[Key]) -> Iterator[int]:
        """Bytes of each of these entries that is whole."""
        frames = self._answers([("GETRANGE", _head(key), 0, FRAME.size - 1) for key in keys])
        entries = [(key, *frame) for key, data in zip(keys, frames, strict=True) if (frame := _frame(data))]
        names = [(_head(key), *(_body(key, layer) for layer in range(layers))) for key, layers, _ in entries]
        lengths = iter(self._answers([("STRLEN", name) for entry in names for name in entry]))
        for _, layers, size in entries:
            head, *body = islice(lengths, layers + 1)
            if head and sum(body) == size:
                yield head - FRAME.size + size

    def _answers(self, commands: Sequence[Command]) -> list[Any]:
        return [self.link.accepted(reply) for reply in self.link.exchange(commands, self.link.deadline(0))]

    def _why_short(self, key: Key, layer: int, end: int) -> StoreError:
        """GETRANGE gives few or no bytes both for a value that is gone and for one that ends before byte `end`."""
        layers, length = self._layers(key), self.link.ask("STRLEN", _body(key, layer))
        # Long enough now: it was gone when it was read, and has been put again since.
        if layers is None or (layer < layers and (length == 0 or length >= end)):
            return EntryMissing(f"layer {layer} of {key} is not in {self.link.where}")
        return EntryCorrupt(f"layer {layer} of {key} has {length} bytes, byte {end} was to be read")


def _head(key: Key) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"not a key: {key[:80]!r}")
    return f"ragkv:{{{key}}}:head"


def _body(key: Key, layer: int) -> str:
    return f"{_head(key)[: -len('head')]}body:{layer}"


def _frame(data: bytes) -> tuple[int, int] | None:
    """(layers, bytes of the body), or None when this is no frame."""
    if len(data) < FRAME.size:
        return None
    magic, layers, size = FRAME.unpack_from(data)
    return (layers, size) if magic == MAGIC and layers <= MAX_LAYERS else None
