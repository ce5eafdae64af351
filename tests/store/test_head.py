"""Damaged, forged and foreign heads are refused, whatever they contain."""

from __future__ import annotations

import json
import struct

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import EntryCorrupt
from ragkv.store.format.head import FRAME, chunk_key, unpack_head
from ragkv.types import Key, Shape
from tests.store.chunks import FINGERPRINT, SALT, packed, random_kv


def reseal(record: bytes) -> bytes:
    """Return a record in a valid frame, as a forger would make it."""
    frame = FRAME.unpack_from(packed(random_kv())[1])
    return FRAME.pack(frame[0], frame[1], len(record), xxhash.xxh3_128_digest(record)) + record


def altered(head: bytes, change: dict[str, object] | None = None, **tensors: torch.Tensor | None) -> bytes:
    """Return a head with a valid checksum and changed metadata or tensors."""
    record = head[FRAME.size :]
    (size,) = struct.unpack_from("<Q", record)
    metadata = json.loads(json.loads(record[8 : 8 + size])["__metadata__"]["ragkv"])
    parts = {**safetensors.torch.load(record), **tensors}
    kept = {name: tensor for name, tensor in parts.items() if tensor is not None}
    return reseal(safetensors.torch.save(kept, {"ragkv": json.dumps({**metadata, **(change or {})})}))


def test_any_flipped_byte_of_a_head_is_corrupt() -> None:
    key, record, _ = packed(random_kv(tokens=5, shape=Shape(1, 1, 1, 2)))
    for at in range(len(record)):
        damaged = bytearray(record)
        damaged[at] ^= 0x01 << at % 8
        with pytest.raises(EntryCorrupt):
            unpack_head(bytes(damaged), key, FINGERPRINT, SALT)


def test_any_cut_or_lengthened_head_is_corrupt() -> None:
    key, record, _ = packed(random_kv(tokens=5, shape=Shape(1, 1, 1, 2)))
    for damaged in [record[:size] for size in range(len(record))] + [record + b"\0"]:
        with pytest.raises(EntryCorrupt):
            unpack_head(damaged, key, FINGERPRINT, SALT)


def test_a_head_under_another_name_is_corrupt() -> None:
    kv = random_kv()
    key, record, _ = packed(kv)
    assert unpack_head(record, key, FINGERPRINT, SALT).tokens == kv.tokens
    with pytest.raises(EntryCorrupt, match="another chunk"):
        unpack_head(record, chunk_key(FINGERPRINT, SALT, kv.tokens[1:]), FINGERPRINT, SALT)
    with pytest.raises(EntryCorrupt, match="another chunk"):
        unpack_head(record, key, FINGERPRINT, "another collection")
    with pytest.raises(EntryCorrupt, match="made by"):
        unpack_head(record, chunk_key("model 2", SALT, kv.tokens), "model 2", SALT)


FORGERIES = {
    "a tensor missing": (None, {"alpha": None}),
    "a tensor too many": (None, {"beta": torch.zeros(1)}),
    "wrong dtype": (None, {"alpha": torch.zeros((3, 6), dtype=torch.float64)}),
    "wrong shape": (None, {"mean_keys": torch.zeros((3, 6, 2, 9), dtype=torch.float16)}),
    "no dimensions": (None, {"retrieval_keys": torch.zeros((), dtype=torch.float16)}),
    "tags of other blocks": (None, {"tags": torch.zeros((3, 7, 8), dtype=torch.uint8)}),
    "tags of another seal": (None, {"tags": torch.zeros((3, 6, 16), dtype=torch.uint8)}),
    "no tags": (None, {"tags": torch.zeros((3, 6, 0), dtype=torch.uint8)}),
    "landmark outside": (None, {"landmarks": torch.full((3, 6, 4), 22, dtype=torch.int32)}),
    "landmark below": (None, {"landmarks": torch.full((3, 6, 4), -1, dtype=torch.int32)}),
    "too few landmarks": (None, {"landmarks": torch.zeros((3, 6, 3), dtype=torch.int32)}),
    "more tokens than declared": (None, {"tokens": torch.zeros(23, dtype=torch.int32)}),
    "huge": ({"tokens": 2**62}, {}),
    "huge block": ({"block": 2**62}, {}),
    "no block": ({"block": 0}, {}),
    "negative": ({"layers": -3}, {}),
    "not a number": ({"head_dim": "8"}, {}),
    "truth for a number": ({"kv_heads": True}, {}),
    "unknown dtype": ({"dtype": "object"}, {}),
    "other dtype": ({"dtype": "bfloat16"}, {}),
    "unknown body": ({"body": "int4"}, {}),
    "no body": ({"body": None}, {}),
    "fingerprint of another type": ({"fingerprint": ["model 1"]}, {}),
}


@pytest.mark.parametrize(("change", "tensors"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_head_is_corrupt(change: dict[str, object] | None, tensors: dict[str, torch.Tensor]) -> None:
    key, record, _ = packed(random_kv())
    assert unpack_head(altered(record), key, FINGERPRINT, SALT)
    with pytest.raises(EntryCorrupt):
        unpack_head(altered(record, change, **tensors), key, FINGERPRINT, SALT)


def header_only(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "record",
    [
        b"",
        struct.pack("<Q", 2**63) + b"{}",
        header_only({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header_only({"retrieval_keys": {"dtype": "F16", "shape": [2**62, 0], "data_offsets": [0, 0]}}),
        header_only({"a": {"dtype": "F8_E8M0", "shape": [0], "data_offsets": [0, 0]}}),
        header_only({"__metadata__": {"ragkv": "[" * 100_000}}),
        header_only({"__metadata__": {"ragkv": "null"}}),
        header_only({"__metadata__": {}}),
        header_only(b"[" * 100_000),
        header_only(b"\xff\xfe"),
        bytes(4096),
    ],
)
def test_a_record_of_another_kind_is_corrupt(record: bytes) -> None:
    with pytest.raises(EntryCorrupt):
        unpack_head(reseal(record), Key("0" * 64), FINGERPRINT, SALT)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    for forged in (data, reseal(data), reseal(header_only(data))):
        with pytest.raises(EntryCorrupt):
            unpack_head(forged, Key("0" * 64), FINGERPRINT, SALT)
