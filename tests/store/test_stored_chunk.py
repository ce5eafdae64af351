"""A chunk in a real store: intact, damaged in the blocks that are read, and damaged elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragkv.errors import EntryCorrupt
from ragkv.store.base import KVStore, StoreStats
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.head import Head, unpack_head
from ragkv.types import ChunkKV, Key
from tests.redis_server import RedisServer
from tests.store.chunks import FINGERPRINT, SALT, packed, random_kv, read_blocks, same_bits
from tests.store.conftest import Vandal, vandal_of


@pytest.fixture
def stored(store: KVStore, server: RedisServer) -> tuple[KVStore, Key, Head, ChunkKV, Vandal]:
    """A chunk in a real store, and a vandal for it."""
    kv = random_kv()
    key, record, body = packed(kv)
    store.put(key, record, body)
    vandal = vandal_of(store, server.url, record, [len(layer) for layer in body])
    return store, key, unpack_head(store.head(key), key, FINGERPRINT, SALT), kv, vandal


Stored = tuple[KVStore, Key, Head, ChunkKV, Vandal]


def test_a_stored_chunk_is_restored_bit_for_bit(stored: Stored) -> None:
    store, key, head, kv, _ = stored
    assert store.stats() == StoreStats(1, head.bytes + head.layout.body_bytes)
    for layer, (k, v) in enumerate(read_blocks(store, key, head, [range(6)] * 3)):
        assert same_bits(k, kv.k[layer])
        assert same_bits(v, kv.v[layer])


def test_a_flipped_byte_of_a_stored_head_is_corrupt(stored: Stored) -> None:
    store, key, head, _, vandal = stored
    for at in (0, 9, 20, 40, 300, head.bytes - 1):
        vandal.flip_head(key, at)
        with pytest.raises(EntryCorrupt):
            unpack_head(store.head(key), key, FINGERPRINT, SALT)
        data = bytearray(store.head(key))
        data[at] ^= 0xFF
        store.put(key, bytes(data), [b""])


def test_a_flipped_byte_of_a_loaded_block_is_corrupt(stored: Stored) -> None:
    store, key, head, kv, vandal = stored
    part = head.layout.range(1, 2)
    for at in range(part.offset, part.offset + part.size, 37):
        vandal.flip_body(key, 1, at)
        with pytest.raises(EntryCorrupt, match="layer 1, block 2"):
            read_blocks(store, key, head, [[0], [2, 3], []])
        vandal.flip_body(key, 1, at)
    assert same_bits(read_blocks(store, key, head, [[], [2], []])[1][0], kv.k[1, 8:12])


def test_damage_in_blocks_that_are_not_loaded_is_harmless(stored: Stored) -> None:
    store, key, head, kv, vandal = stored
    for layer, block in ((0, 0), (0, 2), (1, 1), (2, 5)):
        part = head.layout.range(layer, block)
        vandal.flip_body(key, layer, part.offset)
        vandal.flip_body(key, layer, part.offset + part.size - 1)
    loaded = read_blocks(store, key, head, [[1, 3], [0, 2], [4]])
    assert same_bits(loaded[0][1], kv.v[0, [4, 5, 6, 7, 12, 13, 14, 15]])
    assert same_bits(loaded[2][0], kv.k[2, 16:20])


def test_a_truncated_layer_is_corrupt(stored: Stored) -> None:
    store, key, head, _, vandal = stored
    vandal.cut(key, 2, head.layout.layer_bytes - 1)
    with pytest.raises(EntryCorrupt):
        read_blocks(store, key, head, [[], [], [5]])


def test_a_file_cut_anywhere_is_corrupt(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    kv = random_kv()
    key, record, body = packed(kv)
    store.put(key, record, body)
    head = unpack_head(record, key, FINGERPRINT, SALT)
    (file,) = tmp_path.glob("*/*.kv")
    whole = file.read_bytes()
    for size in (0, 1, 23, 24, 50, 100, len(record), 4096, 9000, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(EntryCorrupt):
            store.head(key)
        with pytest.raises(EntryCorrupt):
            read_blocks(store, key, head, [[0], [], []])
    assert store.stats() == StoreStats(0, 0)
