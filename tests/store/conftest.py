"""The backends under test, each with a way to damage its stored entries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import redis
from redis.cluster import RedisCluster as ClusterClient

from ragkv.store.base import KVStore
from ragkv.store.disk_store import DiskStore
from ragkv.store.redis_cluster import ClusterStore
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key
from tests.redis_cluster import RedisCluster, redis_cluster
from tests.redis_server import RedisServer, redis_server


class Vandal(Protocol):
    """Damages a stored entry behind the store's back."""

    def flip_head(self, key: Key, at: int) -> None:
        """Invert the bits of one byte of the head as it was put."""

    def flip_body(self, key: Key, layer: int, at: int) -> None:
        """Invert the bits of one byte of a layer."""

    def cut(self, key: Key, layer: int, size: int) -> None:
        """Leave only `size` bytes of a layer."""


class DiskVandal:
    """Damages files. The body is at the end of an entry's file, layer after layer."""

    def __init__(self, root: Path, head: bytes, layers: list[int]) -> None:
        self.root, self.head, self.layers = root, head, layers

    def file(self, key: Key) -> Path:
        return self.root / key[:2] / f"{key}.kv"

    def layer_start(self, key: Key, layer: int) -> int:
        return self.file(key).stat().st_size - sum(self.layers[layer:])

    def flip(self, key: Key, at: int) -> None:
        data = bytearray(self.file(key).read_bytes())
        data[at] ^= 0xFF
        self.file(key).write_bytes(data)

    def flip_head(self, key: Key, at: int) -> None:
        self.flip(key, self.file(key).read_bytes().index(self.head) + at)

    def flip_body(self, key: Key, layer: int, at: int) -> None:
        self.flip(key, self.layer_start(key, layer) + at)

    def cut(self, key: Key, layer: int, size: int) -> None:
        os.truncate(self.file(key), self.layer_start(key, layer) + size)


class RedisVandal:
    """Damages Redis values. The head value begins with a frame of 16 bytes."""

    def __init__(self, client: redis.Redis | ClusterClient) -> None:
        self.client = client

    def flip(self, name: str, at: int) -> None:
        (byte,) = self.client.getrange(name, at, at)
        self.client.setrange(name, at, bytes([byte ^ 0xFF]))

    def flip_head(self, key: Key, at: int) -> None:
        self.flip(f"ragkv:{{{key}}}:head", 16 + at)

    def flip_body(self, key: Key, layer: int, at: int) -> None:
        self.flip(f"ragkv:{{{key}}}:body:{layer}", at)

    def cut(self, key: Key, layer: int, size: int) -> None:
        name = f"ragkv:{{{key}}}:body:{layer}"
        self.client.set(name, self.client.get(name)[:size])


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """A Redis server for all tests. Tests that stop or fill a server start their own."""
    with redis_server() as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """A Redis Cluster for all tests."""
    with redis_cluster() as running:
        yield running


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A Redis server for one test, which may stop or damage it."""
    with redis_server() as running:
        yield running


PATIENCE = 5.0
"""The timeout, in seconds, of tests that do not test timeouts. It is long because other tests run at the same time."""


@pytest.fixture(params=["disk", "redis", "cluster"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    """An empty store of each backend."""
    if request.param == "disk":
        yield DiskStore(tmp_path / "kv")
        return
    opened: KVStore
    if request.param == "redis":
        server = request.getfixturevalue("server")
        servers, opened = [server], RedisStore(server.url, PATIENCE)
    else:
        running = request.getfixturevalue("cluster")
        servers, opened = running.nodes, ClusterStore(running.url, PATIENCE)
    for each in servers:
        with redis.Redis.from_url(each.url) as client:
            client.flushall()
    yield opened
    opened.close()


def client_of(store: KVStore, url: str) -> redis.Redis | ClusterClient:
    """Return a plain client for the data of a Redis store. `url` is that of the single server."""
    if isinstance(store, ClusterStore):
        return ClusterClient.from_url(f"redis://{store.where.split(',')[0]}")
    return redis.Redis.from_url(url)


def vandal_of(store: KVStore, url: str, head: bytes, layers: list[int]) -> Vandal:
    """Return the vandal for a store with one entry of this head and layers of these sizes; `url` as in `client_of`."""
    if isinstance(store, DiskStore):
        return DiskVandal(store.root, head, layers)
    return RedisVandal(client_of(store, url))
