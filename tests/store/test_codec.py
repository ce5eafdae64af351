"""The codec packs a chunk and restores it bit for bit, and gives it a key."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.store.base import Range
from ragkv.store.format.codec import pack
from ragkv.store.format.head import ROUNDED, Head, chunk_key, unpack_head
from ragkv.types import Digest, Shape
from tests.store.chunks import (
    FINGERPRINT,
    SALT,
    SHAPE,
    MemoryBody,
    packed,
    random_kv,
    read_blocks,
    same_bits,
    wanted_bytes,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def rows(head: Head, blocks: list[int]) -> list[int]:
    """Return the token indices of blocks."""
    block = head.layout.block
    return [token for b in blocks for token in range(b * block, min((b + 1) * block, head.layout.tokens))]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), tokens=st.integers(1, 40), block=st.integers(1, 17))
def test_any_choice_of_blocks_is_restored_bit_for_bit(
    data: st.DataObject, dtype: torch.dtype, tokens: int, block: int
) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    shape = Shape(data.draw(st.integers(1, 4)), kv_heads * data.draw(st.integers(1, 2)), kv_heads, 2)
    kv = random_kv(tokens, block, shape, dtype, pairs=data.draw(st.integers(0, 2)), seed=data.draw(st.integers(0, 9)))
    key, record, body = packed(kv, block)
    head = unpack_head(record, key, FINGERPRINT, SALT)
    chosen = st.sets(st.integers(0, head.layout.blocks - 1)).map(sorted)
    requested = [data.draw(chosen) for _ in range(shape.layers)]
    store = MemoryBody(body)
    loaded = read_blocks(store, key, head, requested)
    for layer, (k, v) in enumerate(loaded):
        assert same_bits(k, kv.k[layer, rows(head, requested[layer])])
        assert same_bits(v, kv.v[layer, rows(head, requested[layer])])
    assert sum(part.size for part in store.ranges) == wanted_bytes(head.layout, requested)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_restores_tokens_layout_and_digest(dtype: torch.dtype) -> None:
    kv = random_kv(dtype=dtype)
    key, record, body = packed(kv)
    head = unpack_head(record, key, FINGERPRINT, SALT)
    assert (head.tokens, head.fingerprint, head.bytes) == (kv.tokens, FINGERPRINT, len(record))
    assert (head.layout.shape, head.layout.tokens, head.layout.block, head.layout.dtype) == (SHAPE, 22, 4, dtype)
    assert head.layout.body_bytes == sum(len(layer) for layer in body)
    for field in fields(Digest):
        stored = torch.float16 if field.name in ROUNDED and dtype == torch.float32 else None
        expected = getattr(kv.digest, field.name)
        expected = expected.to(stored).to(dtype) if stored else expected
        found = getattr(head.digest, field.name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), field.name


def test_a_body_is_its_blocks_each_k_then_v() -> None:
    kv = random_kv()
    key, record, body = packed(kv)
    layout = unpack_head(record, key, FINGERPRINT, SALT).layout
    assert (layout.blocks, layout.block_tokens(0), layout.block_tokens(5)) == (6, 4, 2)
    for layer in range(SHAPE.layers):
        for block in range(layout.blocks):
            tokens = slice(4 * block, 4 * block + layout.block_tokens(block))
            part = layout.range(layer, block)
            data = kv.k[layer, tokens].numpy().tobytes() + kv.v[layer, tokens].numpy().tobytes()
            assert bytes(body[layer][part.offset : part.offset + part.size]) == data
    assert layout.range(0, 1).offset == layout.range(0, 0).size
    with pytest.raises(ValueError, match="block 6"):
        layout.range(0, 6)
    with pytest.raises(ValueError, match="layer 3"):
        layout.range(3, 0)


def test_adjacent_blocks_are_read_as_one_range() -> None:
    key, record, body = packed(random_kv())
    head = unpack_head(record, key, FINGERPRINT, SALT)
    store = MemoryBody(body)
    read_blocks(store, key, head, [[0, 1, 2, 4, 5], [], [0, 5]])
    full = head.layout.range(0, 0).size
    last = head.layout.range(0, 5).size
    assert store.ranges == [
        Range(0, 0, 3 * full),
        Range(0, 4 * full, full + last),
        Range(2, 0, full),
        Range(2, 5 * full, last),
    ]


def test_layers_without_wanted_blocks_give_empty_tensors() -> None:
    key, record, body = packed(random_kv())
    head = unpack_head(record, key, FINGERPRINT, SALT)
    store = MemoryBody(body)
    assert [(k.shape, v.dtype) for k, v in read_blocks(store, key, head, [[], [], []])] == [
        ((0, 2, 8), torch.float32)
    ] * 3
    assert store.ranges == []
    assert [len(k) for k, _ in read_blocks(store, key, head, [[], [5], []])] == [0, 2, 0]


@pytest.mark.parametrize("requested", [[[0]], [[1, 0], [], []], [[1, 1], [], []], [[6], [], []], [[-1], [], []]])
def test_invalid_block_ids_are_refused(requested: list[list[int]]) -> None:
    key, record, body = packed(random_kv())
    head = unpack_head(record, key, FINGERPRINT, SALT)
    with pytest.raises(ValueError, match="blocks wanted"):
        read_blocks(MemoryBody(body), key, head, requested)


def test_keys_too_large_for_half_precision_stay_finite() -> None:
    kv = random_kv()
    kv.digest.mean_keys[0, 0, 0, :2] = torch.tensor([1e30, -70_000.0])
    key, record, _ = packed(kv)
    found = unpack_head(record, key, FINGERPRINT, SALT).digest.mean_keys
    assert found[0, 0, 0, :2].tolist() == [65504.0, -65504.0]


def test_equal_chunks_are_equal_bytes() -> None:
    one, other = packed(random_kv()), packed(random_kv())
    assert one[:2] == other[:2]
    assert list(map(bytes, one[2])) == list(map(bytes, other[2]))


def test_chunks_that_cannot_be_stored_are_refused() -> None:
    kv = random_kv()
    wrong = [
        replace(kv, v=kv.v[:, :-1]),
        replace(kv, v=kv.v.double()),
        replace(kv, tokens=kv.tokens[:-1]),
        replace(kv, digest=replace(kv.digest, alpha=kv.digest.alpha[:, :-1])),
        replace(kv, k=kv.k[:, :0], v=kv.v[:, :0], tokens=()),
        replace(kv, k=kv.k.int(), v=kv.v.int()),
    ]
    for broken in wrong:
        with pytest.raises(ValueError, match=r"store|tokens|alpha"):
            pack(broken, 4, FINGERPRINT)
    with pytest.raises(ValueError, match="blocks of 0"):
        pack(kv, 0, FINGERPRINT)


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from ragkv.store.format.head import chunk_key; print(chunk_key('model', 'salt', (1, 2, 70000)))"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert chunk_key("model", "salt", (1, 2, 70000)) == done.stdout.strip()
    # A literal, because a change of the encoding would lose every stored chunk and must be noticed.
    golden = "b512b74e7adc2a30128506770b5df78937c1d1db0dfcbbc08f42a95c6c55c4ff"
    assert done.stdout.strip() == golden


def test_different_chunks_have_different_keys() -> None:
    keys = [
        chunk_key(fingerprint, salt, tokens)
        for fingerprint, salt, tokens in [
            ("ab", "c", (1, 2)),
            ("a", "bc", (1, 2)),
            ("abc", "", (1, 2)),
            ("", "abc", (1, 2)),
            ("ab", "c", (12,)),
            ("ab", "c", (1, 2, 0)),
            ("ab", "c", (2, 1)),
            ("ab", "c", (1 + 2 * 2**32,)),
            ("ab", "c", ()),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert chunk_key("ab", "c", [1, 2]) == chunk_key("ab", "c", np.array([1, 2])) == keys[0]
