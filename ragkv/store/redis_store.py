"""The Redis store: plain string values (redis_entry.py), read with GETRANGE so that only wanted bytes leave the server.

Reads. Large ranges are cut into pieces of half a megabyte. Each connection keeps about a megabyte of requests in
flight, so the server always has the next request and never much to buffer. All connections take their pieces from one
list, in order: earlier ranges arrive first, and a slow connection takes fewer pieces. The kernel writes a piece where
it belongs in the output buffer. One connection with requests in flight keeps one thread of the server busy. More
connections, each with a thread that also verifies what it has read, are opened only for loads that are large enough
to pay for waking a thread, and only as far as processors are free (measured in docs/results/store.md).

A read of several requests that meets a writer may mix old bytes and new. Two writers of one key write the same chunk;
if they do not, the block checksums of the head detect it (tier.py).

Writes. An entry is written in one transaction, so no reader sees a head without its body. The server needs room for
the old entry and the new one, as every atomic swap does. A transaction that is cut off changes nothing.

Eviction. Under `noeviction` a full server raises StoreFull. Under `allkeys-lru` an entry that has lost a part is
EntryMissing.

Expiry. With a `ttl` the values expire, the head a second before the body, so that a reader that has the head finds the
body. A read does not renew the expiry: that would take a command for every value, and the age would have no bound.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ragkv.errors import EntryCorrupt, EntryMissing, StoreError
from ragkv.store.base import Arrived, Range, StoreStats, Swept, ignore
from ragkv.store.redis_entry import (
    FRAME,
    MAX_LAYERS,
    RedisMemory,
    body_name,
    entry_sizes,
    head_name,
    layer_count,
    pack_frame,
    scan_keys,
    server_memory,
    unpack_frame,
)
from ragkv.store.redis_leases import RedisLeases, lease_name
from ragkv.store.redis_link import ServerLink
from ragkv.store.redis_pieces import PIECE, Piece, UnexpectedReply, cut
from ragkv.store.redis_wire import Command, RespConnection, ServerRefusal
from ragkv.types import Key

IN_FLIGHT_BYTES, IN_FLIGHT = 2**20, 64
"""Most bytes and most requests that a connection has in flight."""
PARALLEL_BYTES = 4 * 2**20
"""Loads of this size use several connections."""
MAX_CONNECTIONS = 4
STATS_BATCH = 64
HEAD_BYTES = 4 * 2**20
"""The deadline for a head allows for this size, because its true size is known only when it has arrived."""


class _Abandoned(Exception):
    """Closes a connection whose remaining replies nobody will read."""


class RedisStore:
    """KVStore over one Redis server. Thread-safe.

    redis_link.py describes how it treats a server that is down or hangs.

    Attributes:
        link: The server.
        leases: See KVStore.leases.
    """

    def __init__(self, url: str, timeout: float, ttl: float | None = None, connections: int | None = None) -> None:
        """Prepare the connections. The server need not answer yet.

        Args:
            url: A `redis://`, `rediss://` or `unix://` URL.
            timeout: Seconds, as in redis_link.py.
            ttl: Seconds that an entry lives; None for no expiry.
            connections: Most connections for one load. By default one less than the processors, at most 4.

        Raises:
            ConfigError: The URL is malformed.
        """
        self.link = ServerLink(url, timeout)
        self.leases = RedisLeases(self.link)
        self._connections = connections or max(1, min(MAX_CONNECTIONS, len(os.sched_getaffinity(0)) - 1))
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        # In milliseconds, at least one: Redis refuses an expiry of 0.
        self._head_expiry: tuple[Any, ...] = ("PX", max(1, round(1000 * ttl))) if ttl else ()
        self._body_expiry: tuple[Any, ...] = ("PX", max(1, round(1000 * ttl)) + 1000) if ttl else ()

    def __repr__(self) -> str:
        return f"RedisStore({self.link.address!r})"

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """See KVStore.put. It is one transaction, so a refusal changes nothing."""
        if len(body) > MAX_LAYERS:
            raise ValueError(f"{len(body)} layers, at most {MAX_LAYERS} can be stored")
        size = sum(memoryview(layer).nbytes for layer in body)
        surplus = [body_name(key, layer) for layer in range(len(body), layer_count(self.link, key) or 0)]
        commands: list[Command] = [("MULTI",), ("UNLINK", lease_name(key), *surplus)]
        commands += [("SET", body_name(key, layer), data, *self._body_expiry) for layer, data in enumerate(body)]
        commands += [("SET", head_name(key), pack_frame(len(body), size) + head, *self._head_expiry), ("EXEC",)]
        # The first refusal says why EXEC was refused.
        for reply in self.link.pipeline(commands, self.link.deadline(len(head) + size)):
            for part in reply if isinstance(reply, list) else [reply]:
                self.link.checked(part)

    def head(self, key: Key) -> bytes:
        """See KVStore.head."""
        data = self.link.command("GET", head_name(key), size=HEAD_BYTES)
        if data is None:
            raise EntryMissing(f"{key} is not in {self.link.address}")
        if unpack_frame(data) is None:
            raise EntryCorrupt(f"{key} has a damaged frame")
        return bytes(memoryview(data)[FRAME.size :])

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """See KVStore.read. `arrived` may be called in other threads, but only once for each range."""
        total = sum(part.size for part in ranges)
        if total != out.nbytes:
            raise ValueError(f"{out.nbytes} bytes to fill with ranges of {total} bytes")
        for part in ranges:
            if part.layer < 0 or part.offset < 0 or part.size < 0:
                raise EntryCorrupt(f"{key}: {part} lies outside its layer")
        load = RangeLoad(self.link, [body_name(key, part.layer) for part in ranges], ranges, out, arrived)
        helpers = self._start_helpers(load) if total >= PARALLEL_BYTES and self._connections > 1 else []
        load.run()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if isinstance(load.fault, UnexpectedReply):
            raise self._read_error(key, ranges, load.fault)
        if load.fault is not None:
            raise load.fault

    def layers(self, key: Key) -> tuple[int, ...]:
        """See KVStore.layers. It sends one command per layer."""
        count = layer_count(self.link, key)
        if count is None:
            raise EntryMissing(f"{key} is not in {self.link.address}")
        sizes = tuple(self.link.command("STRLEN", body_name(key, layer)) for layer in range(min(count, MAX_LAYERS)))
        if not all(sizes):
            raise EntryMissing(f"{key} has lost a layer in {self.link.address}")
        return sizes

    def delete(self, key: Key) -> bool:
        """See KVStore.delete. One command removes the whole entry."""
        layers = layer_count(self.link, key)
        if layers is None:
            return False
        return bool(self.link.command("UNLINK", head_name(key), *(body_name(key, layer) for layer in range(layers))))

    def give_way(self, path: Path, size: int, full: bool) -> bool:
        """See KVStore.give_way. The entries are in memory, and elsewhere."""
        return False

    def keys(self) -> Iterator[Key]:
        """See KVStore.keys. SCAN walks the whole database."""
        return scan_keys(self.link)

    def stats(self) -> StoreStats:
        """See KVStore.stats. It asks for the length of every value, and skips entries that have lost a part."""
        keys = list(self.keys())
        batches = (keys[start : start + STATS_BATCH] for start in range(0, len(keys), STATS_BATCH))
        sizes = [size for batch in batches for size in entry_sizes(self.link, batch)]
        return StoreStats(len(sizes), sum(sizes))

    def sweep(self, dry_run: bool) -> Swept:
        """See KVStore.sweep. There is nothing to do: the server expires values, and a transaction leaves no partial
        entry."""
        return Swept()

    def ping(self) -> None:
        """See KVStore.ping. Like every call, it fails at once for a second after a failure."""
        self.link.command("PING")

    def memory(self) -> tuple[RedisMemory, ...]:
        """Return what the server reports about its memory. Raises StoreUnavailable when it does not."""
        return (server_memory(self.link),)

    def close(self) -> None:
        """See KVStore.close. The next large load would start new threads."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            self._threads = None
        self.link.close()

    def _start_helpers(self, load: RangeLoad) -> list[Future[None]]:
        """Let threads work on a load. It does not depend on them: all may be busy, or the process was forked."""
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(self._connections - 1, "ragkv-redis")
            return [self._threads.submit(load.run) for _ in range(self._connections - 1)]

    def _read_error(self, key: Key, ranges: Sequence[Range], unexpected: UnexpectedReply) -> StoreError:
        """Return why a piece did not arrive. GETRANGE returns too few bytes for a value that is gone and for a value
        that is too short."""
        if isinstance(unexpected.reply, ServerRefusal):
            return self.link.refusal_error(unexpected.reply)
        number, _, start, size, _ = unexpected.piece
        layer, end = ranges[number].layer, start + size
        layers, length = layer_count(self.link, key), self.link.command("STRLEN", body_name(key, layer))
        # A value that is long enough now was gone during the read and has been put again since.
        if layers is None or (layer < layers and (length == 0 or length >= end)):
            return EntryMissing(f"layer {layer} of {key} is not in {self.link.address}")
        return EntryCorrupt(f"layer {layer} of {key} has {length} bytes, byte {end} was to be read")


class RangeLoad:
    """One read, on which several threads may work.

    Attributes:
        fault: The first error, which ends the load.
    """

    def __init__(
        self, link: ServerLink, names: Sequence[str], ranges: Sequence[Range], out: memoryview, arrived: Arrived
    ) -> None:
        """Cut ranges of values into pieces.

        Args:
            link: Connections to the server.
            names: Name of the value of each range.
            ranges: What to read.
            out: Where the ranges go, one after another.
            arrived: Is called with the number of each range that is whole.
        """
        self.fault: BaseException | None = None
        self._link, self._out, self._arrived = link, out, arrived
        self._deadline = link.deadline(out.nbytes)
        self._lock = threading.Lock()
        self._pieces = cut(names, ranges)
        self._missing = [-(-part.size // PIECE) for part in ranges]
        for number, pieces in enumerate(self._missing):
            if pieces == 0:
                arrived(number)

    def run(self) -> None:
        """Read pieces over one connection until none are left. Errors are stored in `fault`, not raised."""
        try:
            pending = deque(self._next_pieces(IN_FLIGHT_BYTES, IN_FLIGHT))
            if not pending:
                return
            with self._link.connection() as wire:
                in_flight = self._request(wire, pending)
                while pending:
                    number, _, _, size, at = piece = pending.popleft()
                    reply = wire.fill(self._out[at : at + size], min(self._deadline, self._link.deadline(size)))
                    if reply != size:
                        self._fail(UnexpectedReply(piece, reply))
                    in_flight -= size
                    if in_flight <= IN_FLIGHT_BYTES // 2 and len(pending) <= IN_FLIGHT // 2:
                        more = self._next_pieces(IN_FLIGHT_BYTES - in_flight, IN_FLIGHT - len(pending))
                        in_flight += self._request(wire, more)
                        pending.extend(more)
                    if self.fault is None:
                        self._count(number)
                    if self.fault is not None:
                        raise _Abandoned
        except _Abandoned:
            pass
        except BaseException as fault:
            self._fail(fault)

    def _request(self, wire: RespConnection, pieces: Iterable[Piece]) -> int:
        """Request pieces and return their bytes."""
        wire.send((("GETRANGE", name, start, start + size - 1) for _, name, start, size, _ in pieces), self._deadline)
        return sum(size for *_, size, _ in pieces)

    def _next_pieces(self, room: int, count: int) -> list[Piece]:
        """Take the next pieces, at most `count` and not many more than `room` bytes; none after a fault."""
        pieces: list[Piece] = []
        with self._lock:
            while self.fault is None and room > 0 and len(pieces) < count and (piece := next(self._pieces, None)):
                pieces.append(piece)
                room -= piece[3]
        return pieces

    def _count(self, number: int) -> None:
        """Count a piece of a range that has arrived, and report the range when it is whole."""
        with self._lock:
            self._missing[number] -= 1
            whole = self._missing[number] == 0
        if whole:
            try:
                self._arrived(number)
            except BaseException as fault:
                self._fail(fault)

    def _fail(self, fault: BaseException) -> None:
        with self._lock:
            self.fault = self.fault or fault
