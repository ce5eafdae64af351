"""Operations of a decode step: the references against formulas in float64, the Triton kernels against both."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.kernels import decode_step as reference
from ragkv.kernels.decode_step import CachePointers, HeadNorms, splits_of
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.types import Shape
from tests import tiny

triton_decode_step = pytest.importorskip("ragkv.kernels.triton_decode_step")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {"reference": reference, "triton": triton_decode_step}
HEADS = [(2, 2), (4, 1), (14, 2)]
"""Query and kv heads, with 1, 4 and 7 query heads to a kv head."""
ROOM = 3
"""Free rows of a cache behind the new row."""


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def pointers_of(lengths, shape, dtype=torch.float32, seed=0):
    """Make caches of random rows for requests of the given lengths, with a different number of rows in each layer."""
    held = [[max(0, length - layer) for length in lengths] for layer in range(shape.layers)]
    k, v = (
        [
            [
                random(
                    rows + 1 + ROOM,
                    shape.kv_heads,
                    shape.head_dim,
                    seed=seed + 2 * (layer + 10 * i) + side,
                    dtype=dtype,
                )
                for i, rows in enumerate(layer_rows)
            ]
            for layer, layer_rows in enumerate(held)
        ]
        for side in (0, 1)
    )
    addresses = [[[each.data_ptr() for each in layer] for layer in store] for store in (k, v)]
    return CachePointers(torch.tensor([*addresses, held], device=DEVICE), k, v)


def copy_of(pointers):
    """Return the same rows at other addresses."""
    k, v = ([[each.clone() for each in layer] for layer in store] for store in (pointers.k, pointers.v))
    addresses = [[[each.data_ptr() for each in layer] for layer in store] for store in (k, v)]
    return CachePointers(torch.cat([torch.tensor(addresses, device=DEVICE), pointers.table[2:]]), k, v)


def normed(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x, angles):
    """Compute RoPE as rotations of pairs in the complex plane: x [W, heads, d], angles [W, d / 2]."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("count", "size"), [(1, 64), (3, 100), (5, 2560)])
def test_a_sum_and_its_norm(name, count, size):
    x, y, weight = random(count, size, seed=1), random(count, size, seed=2), random(size, seed=3)
    both, out = KERNELS[name].add_norm(x, y, weight, 1e-5)
    torch.testing.assert_close(both.double(), x.double() + y.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.double(), normed(x.double() + y.double(), weight, 1e-5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("count", "size"), [(1, 16), (2, 1100), (5, 300)])
def test_a_gated_product(name, count, size):
    gate_up = random(count, 2 * size)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(KERNELS[name].gated(gate_up).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("lengths", "d"), [((7,), 16), ((0, 300), 80), ((5, 1, 9, 64, 2), 128)])
@pytest.mark.parametrize("with_norms", [False, True])
def test_new_rows_are_rotated_and_appended_to_their_request(name, q_heads, kv_heads, lengths, d, with_norms):
    shape, layer, count = Shape(2, q_heads, kv_heads, d), 1, len(lengths)
    pointers, before = pointers_of(lengths, shape), pointers_of(lengths, shape)
    qkv, angles = random(count, (q_heads + 2 * kv_heads) * d, seed=5), random(count, d // 2, seed=6).double() * 3
    cos, sin = (torch.cat([each, each], -1).float().contiguous() for each in (angles.cos(), angles.sin()))
    norms = HeadNorms(random(2, d, seed=7), 1e-6) if with_norms else None
    out = KERNELS[name].rope_append(qkv, cos, sin, pointers, layer, shape, norms)

    q, k, v = qkv.view(count, -1, d).split((q_heads, kv_heads, kv_heads), 1)
    if norms is not None:
        q, k = normed(q, norms.weight[0], 1e-6), normed(k, norms.weight[1], 1e-6)
    torch.testing.assert_close(out.double(), rotated(q, angles), rtol=0, atol=1e-5)
    k = rotated(k, angles)
    for i, held in enumerate(pointers.table[2, layer].tolist()):
        torch.testing.assert_close(pointers.k[layer][i][held].double(), k[i], rtol=0, atol=1e-5)
        torch.testing.assert_close(pointers.v[layer][i][held], v[i], rtol=0, atol=0)
        for now, then in ((pointers.k, before.k), (pointers.v, before.v)):
            others = torch.arange(now[layer][i].shape[0]) != held
            assert torch.equal(now[layer][i][others], then[layer][i][others])
            assert torch.equal(now[0][i], then[0][i])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("lengths", "d", "splits"),
    [
        ((0,), 16, 1),
        ((1, 63), 32, 2),
        ((64, 127, 300), 64, 4),  # most splits of the first two have no keys
        ((200, 3, 65, 130), 128, 1),
        ((30, 299, 0, 128, 191), 40, 8),
    ],
)
def test_attention_is_that_of_all_rows_for_any_number_of_splits(name, q_heads, kv_heads, lengths, d, splits):
    shape, layer = Shape(2, q_heads, kv_heads, d), 1
    pointers, q = pointers_of(lengths, shape), random(len(lengths), q_heads, d, seed=3)
    for store in (pointers.k, pointers.v):  # memory behind the rows is unused and may hold anything
        for i, held in enumerate(pointers.table[2, layer].tolist()):
            store[layer][i][held + 1 :] = math.nan
    out = KERNELS[name].attend(q, pointers, layer, shape, scale=0.3, splits=splits)
    for i, held in enumerate(pointers.table[2, layer].tolist()):
        k, v = (
            store[layer][i][: held + 1].double().repeat_interleave(q_heads // kv_heads, dim=1)
            for store in (pointers.k, pointers.v)
        )
        weights = (torch.einsum("hd,nhd->hn", q[i].double(), k) * 0.3).softmax(-1)
        torch.testing.assert_close(out[i].double(), torch.einsum("hn,nhd->hd", weights, v), rtol=0, atol=1e-5)


def test_kernels_round_where_the_references_do():
    """All operations of a layer in sequence, in half precision."""
    # The interpreter cannot multiply bfloat16.
    half, shape = torch.bfloat16 if DEVICE == "cuda" else torch.float16, Shape(2, 8, 2, 64)
    first = pointers_of((70, 5), shape, half)
    qkv, x = random(2, 12 * 64, seed=1, dtype=half), random(2, 512, seed=2, dtype=half)
    cos, sin = random(2, 32, seed=3).cos().repeat(1, 2).to(half), random(2, 32, seed=3).sin().repeat(1, 2).to(half)
    norms, weight = HeadNorms(random(2, 64, seed=4, dtype=half), 1e-6), random(512, seed=5, dtype=half)
    results = []
    for kernels, pointers in ((reference, first), (triton_decode_step, copy_of(first))):
        q = kernels.rope_append(qkv, cos, sin, pointers, 1, shape, norms)
        attended = kernels.attend(q, pointers, 1, shape, scale=0.125, splits=2)
        both, out = kernels.add_norm(x, attended.flatten(1), weight, 1e-5)
        gated = kernels.gated(out)
        assert {each.dtype for each in (q, attended, both, out, gated)} == {half}
        results.append((q, attended, both, out, gated, pointers.k[1][0][69], pointers.v[1][0][69]))
    near = 3e-3 if half == torch.float16 else 1e-2  # bfloat16 has three bits less
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() < near * one.float().norm()


@pytest.mark.parametrize(
    ("width", "kv_heads", "rows", "parts"),
    [
        (1, 8, 16384, 32),
        (4, 8, 16384, 8),
        (16, 8, 16384, 2),
        (32, 8, 16384, 1),
        (1, 8, 1, 1),
        (1, 8, 700, 4),
        (1, 2, 32768, 64),
    ],
)
def test_keys_are_split_as_far_as_programs_and_keys_allow(width, kv_heads, rows, parts):
    assert splits_of(width, kv_heads, rows) == parts


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_a_whole_step_of_kernels_is_the_models_forward(kind):
    """Three requests at a width of four, found by address, whose caches grow."""
    weights = tiny.weights(kind, layers=2)
    with torch.no_grad():
        for name, each in weights.named_parameters():
            if name.endswith("bias") or "norm" in name:
                each.uniform_(0.5, 1.5)
    model = DecoderModel(weights.float().to(DEVICE))
    decoder = GraphDecoder(model, triton_decode_step)
    lengths = (4, 1, 290)
    caches, others = ([ContextCache(model.shape, n + 1, model.dtype, DEVICE) for n in lengths] for _ in range(2))
    for each in (caches, others):
        model.forward([append(c, tiny.tokens(n, n), 0, outputs=0) for c, n in zip(each, lengths, strict=True)])
    for step in range(3):
        tokens, at = [7 + step, 30, 50 + step], [n + step for n in lengths]
        expected = model.forward([append(c, [t], p) for c, t, p in zip(others, tokens, at, strict=True)])
        torch.testing.assert_close(decoder.decode(caches, tokens, at), torch.cat(expected), rtol=0, atol=1e-4)
