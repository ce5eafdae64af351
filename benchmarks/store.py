"""`ragkv bench store`: throughput of sparse loads from the stores, compared with Redis clients and plain sockets.

There is one entry of random bytes. A sparse load reads a share of its blocks, in order, as ranges of one size. Readers:

    disk, redis           our stores, by KVStore.read into an allocated buffer; xxh3 of every range is verified
    host pool             blocks in memory (store/tier.py): looked up, pinned, copied out; they were verified when they
                          were loaded
    redis-py GET          one value per range, asked for one by one     redis-py MGET    all of them in one command
    plain socket 1, 2, 4  one value per range: GET and recv_into an allocated buffer, with as many sockets and threads

The whole entry is read too: all layers from our stores, and one value of the same size by redis-py. Only our stores
verify what they read. The readers take turns, so that a slow moment of the machine affects all of them. Each reads once
before timing starts, and the result of that load is checked. The disk store reads from the page cache.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
import xxhash
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.rivals import Load, at_once, by_sockets, each, own_server
from ragkv.errors import EntryCorrupt
from ragkv.store import KVStore, open_store
from ragkv.store.base import Range
from ragkv.store.block_pool import BlockPool
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.layout import BlockRanges
from ragkv.store.redis_link import connected_socket
from ragkv.store.tier import Tier, TierBytes
from ragkv.types import Key

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

KEY = Key("be7c" * 16)
PREFIX = "ragkv-bench:"
SOCKETS = (1, 2, 4)
WHOLE = 0
"""Stands for the whole entry in place of a range size."""


@dataclass(frozen=True)
class StoreParams:
    """What is measured.

    Attributes:
        layers: layers of the entry.
        layer_bytes: bytes of a layer.
        ranges: sizes of the ranges, bytes.
        share: share of the blocks that a sparse load reads.
        repeat: timed loads of each reader.
        seed: seed of the bytes and of the choice of blocks.
    """

    layers: int = 8
    layer_bytes: int = 16 * 2**20
    ranges: tuple[int, ...] = (2**18, 2**20, 2**22)
    share: float = 0.15
    repeat: int = 100
    seed: int = 7


@dataclass(frozen=True)
class StoreRow:
    """One reader at one size of ranges.

    Attributes:
        range_bytes: size of the ranges; WHOLE: the whole entry.
        bytes: bytes of a load.
        gb_per_s: 10^9 bytes per second in the median load.
        p50: median milliseconds.
        p99: 99th percentile, milliseconds.
        verified: whether checksums were verified.
    """

    reader: str
    range_bytes: int
    bytes: int
    gb_per_s: float
    p50: float
    p99: float
    verified: bool


@dataclass(frozen=True)
class Comparison:
    """The Redis store at one size of ranges, compared by median times.

    Attributes:
        to_get: time of redis-py's single GETs / time of the store.
        to_socket: time of the fastest plain socket / time of the store.
        to_whole: time of a sparse load / time of the whole entry.
    """

    range_bytes: int
    to_get: float
    to_socket: float
    to_whole: float


@dataclass(frozen=True)
class StoreResult:
    """All rows. server: the Redis that was measured. hiredis: whether redis-py used it."""

    server: str
    hiredis: bool
    cores: int
    entry_bytes: int
    share: float
    repeat: int
    rows: tuple[StoreRow, ...]
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, eq=False)
class _Contestant:
    """`load` reads into `out`, or returns the bytes if that is None; they must be `expected`."""

    reader: str
    range_bytes: int
    load: Load
    out: memoryview | None
    expected: bytes
    verified: bool = False


def store(setting: str, timeout: float, params: StoreParams, progress: Progress) -> StoreResult:
    """Measure the disk store and a Redis: the one that `setting` names, or, if that is `disk`, one started for the run.

    All entries are removed afterwards. Without a redis-server only the disk is measured. Raises ConfigError and
    StoreError.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-bench-store-")))
        url = stack.enter_context(own_server(folder)) if setting == "disk" else setting
        bench = _Bench(params)
        stack.callback(bench.close)
        bench.enter("disk", DiskStore(folder / "kv"))
        bench.hold("host pool")
        if url is None:
            return bench.run("none: no redis-server is installed", progress)
        bench.enter("redis", open_store(url, folder, timeout))
        if "+cluster:" in url:
            return bench.run("a cluster; the other readers know single servers only", progress)
        version = bench.rivals(url)
        return bench.run(f"{version}, {'started for this run' if setting == 'disk' else 'as given'}", progress)


class _Bench:
    """The entry, its copies on the servers, and the readers."""

    def __init__(self, params: StoreParams) -> None:
        self._params = params
        self._random = random.Random(params.seed)
        generator = np.random.default_rng(params.seed)
        self._body = [generator.bytes(params.layer_bytes) for _ in range(params.layers)]
        self._chosen = {size: self._choose(size) for size in params.ranges}
        self._contestants: list[_Contestant] = []
        self._closing = ExitStack()

    def close(self) -> None:
        """Remove all entries and close all connections."""
        self._closing.close()

    def enter(self, name: str, opened: KVStore) -> None:
        """Add one of our stores."""
        self._closing.callback(opened.close)
        opened.put(KEY, b"bench", self._body)
        self._closing.callback(opened.delete, KEY)
        whole = [Range(layer, 0, self._params.layer_bytes) for layer in range(self._params.layers)]
        for size, ranges in [*self._chosen.items(), (WHOLE, whole)]:
            parts = [self._bytes(part) for part in ranges]
            out = _buffer(parts)
            load = _verified(opened, ranges, out, [xxhash.xxh3_64_intdigest(part) for part in parts])
            self._contestants.append(_Contestant(name, size, load, out, b"".join(parts), verified=True))

    def hold(self, name: str) -> None:
        """Add a pool in host memory that holds all chosen blocks, in slots of their size."""
        for size, ranges in self._chosen.items():
            data = b"".join(map(self._bytes, ranges))
            layer, offset = np.array([(part.layer, part.offset) for part in ranges]).T
            blocks = self._params.layer_bytes // size
            found = BlockRanges(
                layer, offset // size, offset, np.full_like(offset, size), blocks, self._params.layers * blocks
            )
            tier = Tier(name, BlockPool(len(data), size, torch.device("cpu")))
            self._contestants.append(_Contestant(name, size, _held(tier, found, data), None, data))

    def rivals(self, url: str) -> str:
        """Add the other readers, with the same bytes on the same server. Returns the server's version."""
        client = redis.Redis.from_url(url, protocol=2)
        self._closing.callback(client.close)
        lines: list[Any] = [client.connection_pool.get_connection() for _ in range(max(SOCKETS))]
        for line in lines:
            self._closing.callback(line.disconnect)
        for size, ranges in self._chosen.items():
            values = {f"{PREFIX}{size}:{number}": self._bytes(part) for number, part in enumerate(ranges)}
            names, expected = self._put(client, values), b"".join(values.values())
            self._contestants.append(_Contestant("redis-py GET", size, each(client, names), None, expected))
            self._contestants.append(_Contestant("redis-py MGET", size, at_once(client, names), None, expected))
            out = _buffer([expected])
            for count in SOCKETS:
                load = by_sockets([connected_socket(line) for line in lines[:count]], names, size, out)
                self._contestants.append(_Contestant(f"plain socket {count}", size, load, out, expected))
        whole = b"".join(self._body)
        names = self._put(client, {f"{PREFIX}whole": whole})
        self._contestants.append(_Contestant("redis-py GET", WHOLE, each(client, names), None, whole))
        info: Any = client.info("server")
        return f"Redis {info['redis_version']}"

    def run(self, server: str, progress: Progress) -> StoreResult:
        """Run every reader once untimed, then all readers in turns, each turn in another order."""
        for one in self._contestants:
            got: Any = one.load()
            if (b"".join(got) if one.out is None else one.out) != one.expected:
                raise EntryCorrupt(f"{one.reader} does not deliver what was stored")
        times: dict[_Contestant, list[float]] = {one: [] for one in self._contestants}
        for turn in range(self._params.repeat):
            for one in self._random.sample(self._contestants, len(self._contestants)):
                began = time.perf_counter()
                one.load()
                times[one].append(time.perf_counter() - began)
            progress("load", turn + 1, self._params.repeat)
        rows = tuple(_row(one, taken) for one, taken in times.items())
        return StoreResult(
            server=server,
            hiredis=HIREDIS_AVAILABLE,
            cores=len(os.sched_getaffinity(0)),
            entry_bytes=self._params.layers * self._params.layer_bytes,
            share=self._params.share,
            repeat=self._params.repeat,
            rows=rows,
            comparisons=_compared(rows, self._params.ranges),
        )

    def _choose(self, size: int) -> list[Range]:
        """The chosen share of the blocks of this size, at least one, in order."""
        params = self._params
        blocks = [(layer, at) for layer in range(params.layers) for at in range(0, params.layer_bytes - size + 1, size)]
        count = max(1, round(params.share * len(blocks)))
        return [Range(layer, at, size) for layer, at in sorted(self._random.sample(blocks, count))]

    def _bytes(self, part: Range) -> bytes:
        return self._body[part.layer][part.offset : part.offset + part.size]

    def _put(self, client: redis.Redis, values: dict[str, bytes]) -> list[str]:
        for name, value in values.items():
            self._closing.callback(client.delete, name)
            client.set(name, value)
        return list(values)


def _held(tier: Tier, found: BlockRanges, data: bytes) -> Load:
    """Read the parts from a pool, which loads them the first time. Rows have the size of an 8B model in bfloat16."""
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return lambda: [memoryview(tier.fetch(KEY, 2048, found, lambda _: given, TierBytes()).numpy())]  # type: ignore[arg-type]


def _buffer(parts: Sequence[bytes]) -> memoryview:
    """A buffer for these parts. Its pages are touched before anything is timed."""
    return memoryview(bytearray(b"\1") * sum(map(len, parts)))


def _verified(opened: KVStore, ranges: Sequence[Range], out: memoryview, checksums: Sequence[int]) -> Load:
    parts, filled = [], 0
    for part in ranges:
        parts.append(out[filled : filled + part.size])
        filled += part.size

    def arrived(number: int) -> None:
        if xxhash.xxh3_64_intdigest(parts[number]) != checksums[number]:
            raise EntryCorrupt(f"range {number} is damaged")

    return lambda: opened.read(KEY, ranges, out, arrived)


def _row(one: _Contestant, seconds: Sequence[float]) -> StoreRow:
    size, p50 = len(one.expected), statistics.median(seconds)
    p99 = sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]
    return StoreRow(one.reader, one.range_bytes, size, size / p50 / 1e9, 1e3 * p50, 1e3 * p99, one.verified)


def _compared(rows: Sequence[StoreRow], sizes: Sequence[int]) -> tuple[Comparison, ...]:
    """Comparisons of the Redis store with the other readers; empty without them."""
    speed = {(row.reader, row.range_bytes): row.gb_per_s for row in rows}
    time_of = {(row.reader, row.range_bytes): row.p50 for row in rows}
    if ("redis-py GET", WHOLE) not in speed:
        return ()
    return tuple(
        Comparison(
            range_bytes=size,
            to_get=speed["redis", size] / speed["redis-py GET", size],
            to_socket=speed["redis", size] / max(speed[f"plain socket {count}", size] for count in SOCKETS),
            to_whole=time_of["redis", size] / time_of["redis", WHOLE],
        )
        for size in sizes
    )
