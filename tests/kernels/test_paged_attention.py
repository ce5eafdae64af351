"""Attention to blocks in place: the reference against a formula in float64, the Triton kernel against both."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch

from ragkv.kernels import paged_attention as reference
from ragkv.kernels.decode_step import CachePointers, HeadNorms
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockTables
from tests import tiny
from tests.paged import PagedChunks

triton_paged_attention = pytest.importorskip("ragkv.kernels.triton_paged_attention")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {"reference": reference.attend_paged, "triton": triton_paged_attention.attend_paged}
WIDTH = 64


def model_of(dtype, q_heads=8, kv_heads=2, head_dim=16):
    size = q_heads * head_dim
    weights = tiny.weights(layers=2, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, hidden_size=size)
    return DecoderModel(weights.to(DEVICE, dtype))


class Case:
    """Some requests, the caches of a step and its merged projection."""

    def __init__(self, model, requests, chunks, seed=0):
        self.model, self.requests, shape = model, requests, model.shape
        generator = torch.Generator().manual_seed(seed)
        width = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn(len(requests), width, generator=generator).to(DEVICE, model.dtype)
        self.positions = torch.tensor([each.end for each in requests], device=DEVICE)
        self.tables = BlockTables(model, chunks.memory, WIDTH, count())
        self.paged = self.tables.update([each.context for each in requests], 1 + max(each.end for each in requests))
        buffers = [[each.cache.buffers(layer, 1) for each in requests] for layer in range(shape.layers)]
        lengths = [[each.cache.lengths[layer] for each in requests] for layer in range(shape.layers)]
        k, v = ([[pair[side] for pair in layer] for layer in buffers] for side in (0, 1))
        for layer, rows in enumerate(lengths):  # the step's own rows, which `rope_append` writes before
            for i, length in enumerate(rows):
                for store in (k, v):
                    store[layer][i][length] = torch.randn(shape.kv_heads, shape.head_dim, generator=generator)
        addresses = [[[each.data_ptr() for each in layer] for layer in store] for store in (k, v)]
        self.pointers = CachePointers(torch.tensor([*addresses, lengths], device=DEVICE), k, v)

    def queries(self, norms):
        """Return the rotated queries [W, Hq, d]."""
        shape, rotary = self.model.shape, self.model.rotary(self.positions)
        q = self.qkv.view(len(self.requests), -1, shape.head_dim)[:, : shape.q_heads]
        q = q if norms is None else reference.apply_norm(q, norms.weight[0], norms.eps)
        return reference.rotate(q, rotary.cos, rotary.sin).contiguous()

    def attend(self, kernel, layer, norms=None, splits=2):
        return kernel(
            self.queries(norms),
            reference.RawQueries(self.qkv, self.positions, norms),
            self.pointers,
            self.paged,
            layer,
            scale=self.model.scale,
            splits=splits,
        )

    def expected(self, layer, norms=None):
        """Attend in float64 to all rows of each request, rotated where they stand."""
        shape, out = self.model.shape, []
        for i, (q, each) in enumerate(zip(self.queries(norms).double(), self.requests, strict=True)):
            length = each.cache.lengths[layer]
            own = [store[layer][i][length].double()[None] for store in (self.pointers.k, self.pointers.v)]
            whole = each.whole.k(layer).double(), each.whole.v(layer).double()
            k, v = (torch.cat(both) for both in zip(whole, own, strict=True))
            k, v = (x.repeat_interleave(shape.q_heads // shape.kv_heads, dim=1) for x in (k, v))
            weights = (torch.einsum("hd,nhd->hn", q, k) / math.sqrt(shape.head_dim)).softmax(-1)
            out.append(torch.einsum("hn,nhd->hd", weights, v))
        return torch.stack(out)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 4, 16), (8, 2, 32), (12, 2, 24)])
def test_rows_attend_to_their_own_cache_and_to_their_blocks(name, q_heads, kv_heads, head_dim):
    model = model_of(torch.float32, q_heads, kv_heads, head_dim)
    chunks = PagedChunks(model, (70, 8, 21), block=8)
    case = Case(model, [chunks.request(each) for each in ((0, 1, 2), (2, 0), (), (1, 1))], chunks)
    for layer in range(2):
        torch.testing.assert_close(case.attend(KERNELS[name], layer).double(), case.expected(layer), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_queries_are_normed_where_the_model_norms_them(name):
    model = model_of(torch.float32)
    chunks = PagedChunks(model, (30, 9), block=4)
    case = Case(model, [chunks.request((0, 1)), chunks.request((1, 0))], chunks)
    norms = HeadNorms(torch.rand(2, model.shape.head_dim, device=DEVICE) + 0.5, 1e-6)
    torch.testing.assert_close(
        case.attend(KERNELS[name], 1, norms).double(), case.expected(1, norms), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("name", KERNELS)
def test_a_chunk_that_more_rows_read_than_a_unit_serves(name):
    model = model_of(torch.float32, 12, 2, 16)
    lanes = reference.lanes_of(model.shape)
    chunks = PagedChunks(model, (17,), block=4)
    case = Case(model, [chunks.request((0,), 0.5) for _ in range(lanes + 2)], chunks)
    torch.testing.assert_close(case.attend(KERNELS[name], 0).double(), case.expected(0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("block", [1, 24, 80, 600])
def test_blocks_of_any_size(name, block):
    """Also of no power of two, longer than what a program reads at a time, and longer than a segment."""
    chunks = PagedChunks(model := model_of(torch.float32), (70 if block < 100 else 700, 90), block=block)
    case = Case(model, [chunks.request((0, 1)), chunks.request((1,), 1.0)], chunks)
    torch.testing.assert_close(case.attend(KERNELS[name], 0).double(), case.expected(0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_segments_of_a_long_chunk_are_merged(name):
    model = model_of(torch.float32)
    chunks = PagedChunks(model, (2 * reference.SEGMENT + 40,), block=16)
    case = Case(model, [chunks.request((0,), share) for share in (1.0, 0.3)], chunks)
    torch.testing.assert_close(case.attend(KERNELS[name], 1).double(), case.expected(1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("body", ["int8", "fp8"])
def test_quantised_blocks_are_decoded_as_they_are_read(name, body):
    chunks = PagedChunks(model := model_of(torch.float32), (70, 8, 21), block=8, body=body)
    case = Case(model, [chunks.request(each) for each in ((0, 1, 2), (2, 0))], chunks)
    torch.testing.assert_close(case.attend(KERNELS[name], 1).double(), case.expected(1), rtol=0, atol=2e-5)


def test_half_precision_rounds_as_the_reference_does():
    # The interpreter cannot multiply bfloat16.
    model = model_of(torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    chunks = PagedChunks(model, (40, 9), block=8)
    case = Case(model, [chunks.request((0, 1)), chunks.request((1, 0))], chunks)
    found, expected = (case.attend(KERNELS[name], 0).float() for name in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
