"""Seals: what each refuses, and that the secret is never shown."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import EntryCorrupt
from ragkv.store.base import KVStore
from ragkv.store.format.codec import pack
from ragkv.store.format.head import Head, chunk_key, unpack_head
from ragkv.store.format.seal import CHECKSUMS, Keyed, make_seal
from ragkv.types import ChunkKV, Key
from tests.store.chunks import FINGERPRINT, SALT, finite_kv, packed, random_kv, read_blocks, same_bits
from tests.store.test_head import FORGERIES, altered

SECRET = "a secret of the tests, long enough"
SEAL = Keyed(SECRET)
ALL = [range(6)] * 3
Sealed = tuple[KVStore, Key, Head, ChunkKV, list[bytes]]


@pytest.fixture
def sealed(store: KVStore) -> Sealed:
    """A sealed chunk in a real store: the store, its key, its head, the original chunk and its body."""
    kv = finite_kv()
    key, record, body = packed(kv, seal=SEAL)
    store.put(key, record, body)
    return store, key, unpack(store.head(key), key), kv, [bytes(layer) for layer in body]


def unpack(record: bytes, key: Key) -> Head:
    return unpack_head(record, key, FINGERPRINT, SEAL.salt(SALT), SEAL)


def test_a_sealed_chunk_is_restored_bit_for_bit(sealed: Sealed) -> None:
    store, key, head, kv, _ = sealed
    assert head.tags.shape == (3, 6, 16)
    for layer, (k, v) in enumerate(read_blocks(store, key, head, ALL)):
        assert same_bits(k, kv.k[layer])
        assert same_bits(v, kv.v[layer])


def test_keys_depend_on_the_secret() -> None:
    tokens = (1, 2, 3)
    seals = [CHECKSUMS, SEAL, Keyed(SECRET + "!")]
    keys = {chunk_key(FINGERPRINT, seal.salt(name), tokens) for seal in seals for name in ("mine", "theirs")}
    assert len(keys) == 6
    assert len({seal.name for seal in seals}) == 3
    again = Keyed(SECRET)
    assert (again.name, again.salt("mine")) == (SEAL.name, SEAL.salt("mine"))
    assert SEAL.salt("mine") != hmac.digest(SECRET.encode(), b"mine", "sha256").hex(), "each use has its own key"


def test_golden_tags() -> None:
    """Compare with literals, because a change would lose every sealed chunk and must be noticed."""
    key = hmac.digest(SECRET.encode(), b"ragkv seal 1: block", hashlib.sha256)
    assert SEAL.block(b"a block") == hmac.new(key, b"a block", hashlib.sha256).digest()[:16]
    assert SEAL.block(b"a block").hex() == "3b23ec6b5487f9a81313c9ba4aa62222"
    assert SEAL.record(b"a record").hex() == "cfbcaeacaa823eddbdde2a40c50a991f"
    assert SEAL.salt("default") == "6810e7f84116857d28dda04058330cd0588b3bf9cb33041750480255ebbd2795"
    assert CHECKSUMS.block(b"a block").hex() == "cb281e7e401f773b"
    assert len({SEAL.block(b"x"), SEAL.record(b"x"), bytes.fromhex(SEAL.salt("x"))[:16]}) == 3


@given(st.binary(max_size=300))
def test_tags_have_their_sizes_whatever_is_tagged(data: bytes) -> None:
    for seal in (CHECKSUMS, SEAL):
        assert len(seal.record(data)) == 16
        assert len(seal.block(memoryview(data))) == seal.block_bytes
        assert seal.block(data) == seal.block(memoryview(data))


def test_no_secret_means_checksums() -> None:
    assert make_seal("") is CHECKSUMS
    assert make_seal(SECRET).name == SEAL.name


def test_the_secret_is_in_no_repr_and_no_name() -> None:
    shown = repr(SEAL) + SEAL.name + repr(vars(SEAL)) + repr(packed(finite_kv(), seal=SEAL)[1])
    assert SECRET not in shown
    assert SECRET.encode().hex() not in shown
    assert SEAL.name in repr(SEAL)
    assert all(value.hex() not in repr(SEAL) for value in vars(SEAL).values() if isinstance(value, bytes))


def test_a_chunk_that_was_changed_is_refused_although_all_checksums_are_made_anew(sealed: Sealed) -> None:
    store, key, _, kv, _ = sealed
    changed = kv.v.clone()
    changed[1, 8:12] = 1.0
    store.put(key, *pack(replace(kv, v=changed), 4, FINGERPRINT))
    assert unpack_head(store.head(key), chunk_key(FINGERPRINT, SALT, kv.tokens), FINGERPRINT, SALT), (
        "valid without a secret"
    )
    with pytest.raises(EntryCorrupt, match="another secret"):
        unpack(store.head(key), key)


def test_a_head_with_changed_tags_is_refused_even_with_a_new_checksum(sealed: Sealed) -> None:
    store, key, _, _, body = sealed
    mine = store.head(key)
    for tensors in (
        {},
        {"tags": torch.zeros((3, 6, 16), dtype=torch.uint8)},
        {"tags": torch.zeros((3, 6, 0), dtype=torch.uint8)},
        {"tags": torch.frombuffer(bytearray(3 * 6 * 8), dtype=torch.uint8).view(3, 6, 8)},
        {"alpha": torch.zeros(3, 6)},
    ):
        store.put(key, altered(mine, **tensors), body)
        with pytest.raises(EntryCorrupt, match="another secret"):
            unpack(store.head(key), key)


def test_a_changed_block_under_the_sealed_head_is_refused(sealed: Sealed) -> None:
    store, key, head, kv, body = sealed
    part = head.layout.range(1, 2)
    changed = bytearray(body[1])
    changed[part.offset : part.offset + part.size] = torch.ones(part.size // 4).numpy().tobytes()
    store.put(key, store.head(key), [body[0], bytes(changed), body[2]])  # the store's own checksums are valid
    with pytest.raises(EntryCorrupt, match="layer 1, block 2"):
        read_blocks(store, key, head, ALL)
    assert same_bits(read_blocks(store, key, head, [[0], [1, 3], [5]])[1][0], kv.k[1, [4, 5, 6, 7, 12, 13, 14, 15]])


@pytest.mark.parametrize("swap", ["layers", "positions", "chunks"])
def test_blocks_that_trade_places_are_refused(sealed: Sealed, swap: str) -> None:
    store, key, head, _, body = sealed
    size = head.layout.full_bytes
    layers = [bytearray(layer) for layer in body]
    one = slice(2 * size, 3 * size)
    if swap == "layers":
        layers[0][one], layers[1][one] = layers[1][one], layers[0][one]
    elif swap == "positions":
        layers[0][one], layers[0][:size] = layers[0][:size], layers[0][one]
    else:
        other_key, other_head, other = packed(finite_kv(seed=1), seal=SEAL)
        store.put(other_key, other_head, other)
        layers[0][one] = other[0][one]
    store.put(key, store.head(key), [bytes(layer) for layer in layers])
    with pytest.raises(EntryCorrupt, match="layer 0, block"):
        read_blocks(store, key, head, [[0, 2], [], []])
    assert read_blocks(store, key, head, [[3], [3], [3]])


def test_a_whole_entry_under_another_key_is_refused(sealed: Sealed) -> None:
    store, key, *_ = sealed
    other_key, other_head, other = packed(finite_kv(seed=1), seal=SEAL)
    assert unpack(other_head, other_key)
    store.put(key, other_head, other)
    with pytest.raises(EntryCorrupt, match="another chunk"):
        unpack(store.head(key), key)


def test_an_entry_with_another_secret_or_none_is_refused_even_under_the_right_key() -> None:
    kv = finite_kv()
    key, mine, _ = packed(kv, seal=SEAL)
    assert unpack(mine, key)
    for seal in (CHECKSUMS, Keyed(SECRET + "!")):
        with pytest.raises(EntryCorrupt, match="another secret"):
            unpack(pack(kv, 4, FINGERPRINT, "exact", seal)[0], key)
        with pytest.raises(EntryCorrupt, match="another secret"):
            unpack_head(mine, key, FINGERPRINT, SEAL.salt(SALT), seal)


@pytest.mark.parametrize(("change", "tensors"), FORGERIES.values(), ids=FORGERIES)
def test_forged_heads_are_refused_before_they_are_parsed(
    change: dict[str, object] | None, tensors: dict[str, torch.Tensor]
) -> None:
    key, mine, _ = packed(random_kv(), seal=SEAL)
    with pytest.raises(EntryCorrupt, match="another secret"):
        unpack(altered(mine, change, **tensors), key)
