"""The load path: a byte range passes at most five modules from the chunk source to the call that reads it."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ragkv
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.passes import Passes
from ragkv.engine.prefill import Prefiller
from ragkv.model.decoder import DecoderModel
from ragkv.store import redis_link
from ragkv.store.base import KVStore
from ragkv.store.disk_store import DiskStore
from ragkv.store.redis_store import RedisStore
from ragkv.types import ChunkKV
from tests.libraries import chunk_store_of
from tests.redis_server import redis_server

TOKENS = tuple(range(300, 450))
PACKAGE = os.path.dirname(ragkv.__file__) + os.sep
MODULES, FUNCTIONS = 5, 8
"""Most modules and functions of the package on the stack."""
ROOM = 2**22


def calls_from_here() -> list[tuple[str, str]]:
    """Return (file, function) of every ragkv function on the stack of this thread."""
    calls: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            calls.append((name, frame.f_code.co_qualname))
        frame = frame.f_back
    return calls


class Socket:
    """A socket that records who reads from it."""

    def __init__(self, connected: socket.socket, reads: list[list[tuple[str, str]]]) -> None:
        self._connected, self._reads = connected, reads

    def recv_into(self, out: memoryview) -> int:
        self._reads.append(calls_from_here())
        return self._connected.recv_into(out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connected, name)


def never() -> Passes[ChunkKV]:
    raise AssertionError("encoded again")


def load_and_pin(store: KVStore, model: DecoderModel, reads: list[list[tuple[str, str]]], host_bytes: int) -> None:
    """Load blocks from an empty pool, and pin them if there is room; the stacks of all reads are in `reads`."""
    chunks = chunk_store_of(store, model, "f", "c", host_bytes=host_bytes)
    assert chunks.put(Prefiller(model, model.prompt.prefix).encode(TOKENS))[1] is None
    requested = [(0, 3, 9), (), *[(1, 2)] * (model.shape.layers - 2)]
    source = StoredChunk(chunks, TOKENS, False, never)
    reads.clear()
    with pytest.raises(StopIteration):  # it ends without a pass
        next(source.load(requested))
    assert reads
    if host_bytes:
        chunks.tiers.drop_blocks(chunks.key(TOKENS))
        before = len(reads)
        with ThreadPoolExecutor(1) as threads:
            pinned = source.pin(requested, threads)()
        assert pinned is not None
        pinned.release()
        assert len(reads) > before


def check(reads: list[list[tuple[str, str]]]) -> None:
    for calls in reads:
        assert len({name for name, _ in calls}) <= MODULES, calls
        assert len(calls) <= FUNCTIONS, calls


@pytest.mark.parametrize("host_bytes", [0, ROOM])
def test_a_range_from_disk_passes_at_most_five_modules(
    tmp_path: Path, model: DecoderModel, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    reads: list[list[tuple[str, str]]] = []
    preadv = os.preadv

    def recording_preadv(*args: Any) -> int:
        reads.append(calls_from_here())
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", recording_preadv)
    load_and_pin(DiskStore(tmp_path), model, reads, host_bytes)
    check(reads)


@pytest.mark.parametrize("host_bytes", [0, ROOM])
def test_a_range_from_redis_passes_at_most_five_modules(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, host_bytes: int
) -> None:
    reads: list[list[tuple[str, str]]] = []
    connected_socket = redis_link.connected_socket
    monkeypatch.setattr(redis_link, "connected_socket", lambda connection: Socket(connected_socket(connection), reads))
    with redis_server() as server:
        load_and_pin(RedisStore(server.url, 5.0), model, reads, host_bytes)
    check(reads)
