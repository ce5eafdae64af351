"""Quantised bodies: the error bounds, the exact stored bytes, and the numbers that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragkv.errors import NotQuantisable
from ragkv.store.format.codec import as_stored, offsets, pack, unpack
from ragkv.store.format.head import unpack_head
from ragkv.store.format.layout import BODIES, Layout, block_ranges
from ragkv.store.format.quantise import FORMS, dequantise, quantise, refuse_unless
from ragkv.store.tier import fetch_blocks
from ragkv.types import ChunkKV, Digest, Shape
from tests.store.chunks import (
    FINGERPRINT,
    SALT,
    SHAPE,
    MemoryBody,
    finite_kv,
    packed,
    random_kv,
    read_blocks,
    same_bits,
    wanted_bytes,
)

QUANTISED = ["int8", "fp8"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LARGEST = 8e6
"""Near the largest number that has a float16 scale."""


def round_trip(k: Tensor, v: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Quantise and restore blocks [m, n, Hkv, d]."""
    many, tokens, heads, d = k.shape
    layout = Layout(Shape(1, heads, heads, d), many * tokens, tokens, k.dtype, form)
    raw, quantisable = quantise(k, v, layout)
    refuse_unless(quantisable)
    assert raw.shape == (many, layout.full_bytes)
    out = torch.empty((2, many * tokens, heads, d), dtype=k.dtype)
    begin = np.arange(many) * (layout.full_bytes // layout.row_bytes)
    dequantise(raw.view(-1), begin, np.full(many, tokens), layout, out)
    return out[0].view(k.shape), out[1].view(v.shape)


@st.composite
def numbers(draw: st.DrawFn) -> Tensor:
    """Draw [m, n, Hkv, d], from below the smallest float16 to near the largest number that has a scale."""
    dtype = draw(st.sampled_from(DTYPES))
    size = [draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    powers = torch.randint(-30, draw(st.integers(-29, 20)), size, generator=generator)
    x = torch.randn(size, generator=generator, dtype=torch.float64) * 2.0**powers
    largest = min(LARGEST, torch.finfo(dtype).max)
    return x.clamp(-largest, largest).to(dtype)


def scale_of(x: Tensor, dim: int, form: str) -> Tensor:
    """Return the exact scale. The stored scale is at most one float16 step above it."""
    return x.double().abs().amax(dim, keepdim=True) / FORMS[form].largest


def half_up(scale: Tensor) -> Tensor:
    """Return the largest allowed stored scale."""
    return torch.maximum(scale * (1 + 2.0**-10), torch.full_like(scale, 2.0**-24) + scale)


@settings(max_examples=150, deadline=None)
@given(x=numbers(), dim=st.sampled_from([1, 3]))
def test_int8_changes_no_number_by_more_than_half_a_step(x: Tensor, dim: int) -> None:
    back = round_trip(x, x, "int8")[0 if dim == 1 else 1]
    step = half_up(scale_of(x, dim, "int8"))
    rounding = x.double().abs().amax(dim, keepdim=True) * (0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps)
    assert bool(((back.double() - x.double()).abs() <= step / 2 * (1 + 1e-5) + rounding).all())


@settings(max_examples=150, deadline=None)
@given(x=numbers(), dim=st.sampled_from([1, 3]))
def test_fp8_changes_no_number_by_more_than_a_sixteenth(x: Tensor, dim: int) -> None:
    back = round_trip(x, x, "fp8")[0 if dim == 1 else 1].double()
    step = half_up(scale_of(x, dim, "fp8"))
    bound = torch.maximum(x.double().abs() / 16, step / 1024) * (1 + 1e-5)
    rounding = 0 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps
    smallest = torch.finfo(x.dtype).tiny * rounding
    assert bool(((back - x.double()).abs() <= bound + x.double().abs() * 2 * rounding + smallest).all())


@pytest.mark.parametrize("form", QUANTISED)
def test_a_large_channel_of_k_or_token_of_v_does_not_change_the_others(form: str) -> None:
    k, v = torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)
    loud_k, loud_v = k.clone(), v.clone()
    loud_k[:, :, 0, 3] *= 1000
    loud_v[:, 5, 1] *= 1000
    quiet, loud = round_trip(k, v, form), round_trip(loud_k, loud_v, form)
    others_k, others_v = torch.ones_like(k, dtype=torch.bool), torch.ones_like(v, dtype=torch.bool)
    others_k[:, :, 0, 3], others_v[:, 5, 1] = False, False
    assert same_bits(loud[0][others_k], quiet[0][others_k])
    assert same_bits(loud[1][others_v], quiet[1][others_v])


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 65504.0), (torch.float32, 8.3e6)])
def test_the_largest_numbers_stay_finite(form: str, dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([largest, -largest, 1.0, 0.0], dtype=dtype).view(1, 2, 1, 2)
    for back in round_trip(x, x, form):
        assert bool(back.isfinite().all())
        assert back.flatten()[:2].tolist() == pytest.approx([largest, -largest], rel=0.004)


def tiny(k: list[list[float]], v: list[list[float]]) -> ChunkKV:
    """Return a chunk of one layer and one KV head of two dimensions."""
    tokens = len(k)
    blocks = -(-tokens // 2)
    digest = Digest(
        mean_keys=torch.zeros(1, blocks, 1, 2),
        local_query=torch.zeros(1, 1, 2),
        alpha=torch.zeros(1, blocks),
        unimportance=torch.zeros(1, blocks),
        landmarks=torch.zeros((1, blocks, 2), dtype=torch.int32),
        retrieval_keys=torch.zeros(0, tokens, 2),
    )
    rows = (torch.tensor(x).view(1, tokens, 1, 2) for x in (k, v))
    return ChunkKV(tuple(range(tokens)), *rows, digest)


HALVES = {0.0: "0000", 0.25: "0034", 0.5: "0038", 1.0: "003c", 2.0: "0040"}
"""float16, little-endian."""

# A block of two tokens, then one of one. Rows are two bytes long.
K = [[127.0, -63.5], [-1.0, 31.75], [0.0, 254.0]]
V = [[127.0, 1.0], [31.75, -15.8], [0.0, 0.0]]
INT8 = [
    *("7f81", "ff40"),  # K: 127 -127 · -1 64 (31.75 / 0.5 = 63.5, to the even neighbour)
    *("7f01", "7fc1"),  # V: 127 1 · 127 -63 (-15.8 / 0.25 = -63.2)
    HALVES[1.0] + HALVES[0.5],  # scales of K, one a dimension
    HALVES[1.0] + HALVES[0.25],  # scales of V, one a token
    *("007f", "0000", HALVES[0.0] + HALVES[2.0], HALVES[0.0]),  # the last block
]


def test_a_tiny_int8_body_byte_for_byte() -> None:
    head, (body,) = pack(tiny(K, V), 2, FINGERPRINT, "int8")
    assert bytes(body).hex() == "".join(INT8)
    assert b'"body": "int8"' in head.replace(b"\\", b"")


def test_a_tiny_fp8_body_byte_for_byte() -> None:
    # Codes of e4m3: sign, 4 bits of exponent (7 is 1), 3 bits behind the point. 448 is 0x7e, 1 is 0x38, 2^-9 is 0x01.
    k = [[448.0, -1.0], [1.0, 224.0]]
    v = [[448.0, 1.1], [-896.0, 0.0]]
    expected = [
        *("7ec0", "387e"),  # K: 448 -2 · 1 448 (the second channel is halved)
        *("7e39", "fe00"),  # V: 448 1.125 · -448 0
        HALVES[1.0] + HALVES[0.5],
        HALVES[1.0] + HALVES[2.0],
    ]
    _, (body,) = pack(tiny(k, v), 2, FINGERPRINT, "fp8")
    assert bytes(body).hex() == "".join(expected)


def test_every_fp8_code_is_restored_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    raw = torch.zeros((1, 256 + 256 + 512 + 256), dtype=torch.uint8)
    layout = Layout(Shape(1, 1, 1, 256), 1, 1, torch.float32, "fp8")
    raw[0, :256], raw[0, 256:512] = codes, codes
    raw[0, 512 : 512 + 514] = torch.full((257,), 0.5, dtype=torch.float16).view(torch.uint8)
    out = torch.empty((2, 1, 1, 256))
    dequantise(raw.view(-1), np.array([0]), np.array([1]), layout, out)
    finite = numbers.isfinite()
    assert int((~finite).sum()) == 2, "the codes of NaN, which quantise never produces"
    for part in out:
        assert same_bits(part.view(-1)[finite], numbers[finite] / 2)


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e30, -3e7])
@pytest.mark.parametrize("part", ["k", "v"])
def test_numbers_without_a_scale_are_refused(form: str, bad: float, part: str) -> None:
    kv = finite_kv()
    spoilt = getattr(kv, part).clone()
    spoilt[1, 21, 1, 3] = bad
    with pytest.raises(NotQuantisable):
        pack(replace(kv, **{part: spoilt}), 4, FINGERPRINT, form)
    pack(replace(kv, **{part: spoilt}), 4, FINGERPRINT)


def test_an_unknown_body_and_an_odd_head_size_are_refused() -> None:
    with pytest.raises(ValueError, match="int4"):
        pack(finite_kv(), 4, FINGERPRINT, "int4")
    odd = finite_kv(shape=Shape(1, 1, 1, 3))
    with pytest.raises(ValueError, match="even"):
        pack(odd, 4, FINGERPRINT, "int8")
    pack(odd, 4, FINGERPRINT)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), form=st.sampled_from(BODIES), dtype=st.sampled_from(DTYPES))
def test_any_choice_of_blocks_is_restored_as_in_the_whole_chunk(
    data: st.DataObject, form: str, dtype: torch.dtype
) -> None:
    tokens, block = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 17))
    heads = data.draw(st.integers(1, 3))
    shape = Shape(data.draw(st.integers(1, 4)), 2 * heads, heads, 2 * data.draw(st.integers(1, 3)))
    kv = finite_kv(tokens, block, shape, dtype, seed=data.draw(st.integers(0, 9)))
    key, record, body = packed(kv, block, form)
    head = unpack_head(record, key, FINGERPRINT, SALT)
    assert (head.layout.body, head.layout.body_bytes) == (form, sum(map(len, body)))
    whole = as_stored(kv, head, body)
    requested = [data.draw(st.sets(st.integers(0, head.layout.blocks - 1)).map(sorted)) for _ in range(shape.layers)]
    store = MemoryBody(body)
    for layer, (k, v) in enumerate(read_blocks(store, key, head, requested)):
        rows = [t for b in requested[layer] for t in range(b * block, min((b + 1) * block, tokens))]
        assert same_bits(k, whole.k[layer, rows])
        assert same_bits(v, whole.v[layer, rows])
    assert (
        sum(part.size for part in store.ranges)
        == wanted_bytes(head.layout, requested)
        == head.layout.wanted_bytes(requested)
    )
    if form == "exact":
        assert same_bits(whole.k, kv.k)
        assert same_bits(whole.v, kv.v)


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_unpack_from_equal_slots_in_any_order(form: str, dtype: torch.dtype) -> None:
    kv = finite_kv(dtype=dtype)
    key, record, body = packed(kv, form=form)
    head = unpack_head(record, key, FINGERPRINT, SALT)
    layout = head.layout
    ranges = block_ranges(layout, [[0, 2, 5], [], [1, 5]])
    raw = fetch_blocks(MemoryBody(body), key, head, ranges)
    slots = torch.full((9, layout.full_bytes), 0xA5, dtype=torch.uint8)
    places = [7, 2, 0, 8, 3]
    for (*_, size), start, place in zip(ranges, offsets(ranges).tolist(), places, strict=True):
        assert start % layout.row_bytes == layout.full_bytes % layout.row_bytes == 0
        slots[place, :size] = raw[start : start + size]
    scattered = unpack(slots.view(-1), np.array(places) * layout.full_bytes, ranges, layout)
    for one, other in zip(scattered, unpack(raw, offsets(ranges), ranges, layout), strict=True):
        assert same_bits(one[0], other[0])
        assert same_bits(one[1], other[1])


@pytest.mark.parametrize("form", QUANTISED)
def test_a_quantised_body_takes_about_one_byte_per_number(form: str) -> None:
    shape = Shape(2, 6, 2, 64)
    exact, small = (Layout(shape, 512, 16, torch.bfloat16, body) for body in ("exact", form))
    assert (exact.full_bytes, small.full_bytes) == (2 * 16 * 128 * 2, 35 * 128)
    assert small.body_bytes / exact.body_bytes < 0.55
    layout = Layout(shape, 37, 16, torch.float32, form)
    assert layout.range(1, 2).offset == 2 * layout.full_bytes
    assert layout.range(1, 2).size == layout.last_bytes == (2 * 5 + 2 + 1) * 128


@pytest.mark.parametrize("form", QUANTISED)
def test_no_body_is_mistaken_for_another(form: str) -> None:
    """All bodies share a key here, as if the fingerprint did not differ. The head tells them apart."""
    kv = finite_kv(shape=SHAPE)
    key, record, _ = packed(kv, form=form)
    head = unpack_head(record, key, FINGERPRINT, SALT)
    assert head.layout.body == form
    assert head.layout != unpack_head(packed(kv)[1], key, FINGERPRINT, SALT).layout


def test_only_exact_bodies_store_random_bits() -> None:
    kv = random_kv()
    assert bool((~kv.k.isfinite()).any())
    pack(kv, 4, FINGERPRINT)
    with pytest.raises(NotQuantisable):
        pack(kv, 4, FINGERPRINT, "int8")
