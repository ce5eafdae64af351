"""The mean attention over heads: the reference, and the Triton kernel, beside the whole matrix in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.kernels import head_mean_reference as reference
from ragkv.kernels.head_mean import mean_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(layers, rows, before, heads=(6, 2), d=16, dtype=torch.float32):
    """Return random queries and keys."""
    g = torch.Generator().manual_seed(rows)
    q = torch.randn(layers, rows, heads[0], d, generator=g)
    k = torch.randn(layers, before + rows, heads[1], d, generator=g)
    return q.to(dtype), k.to(dtype)


def whole(q, k, scale):
    """Compute the mean from the whole matrix of every head."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("gthd,gnhd->ghtn", q, k) * scale
    before = k.shape[1] - q.shape[1]
    hidden = torch.arange(k.shape[1]) > before + torch.arange(q.shape[1])[:, None]
    return scores.masked_fill(hidden, -math.inf).softmax(-1).mean(1)


SIZES = [(1, 5, 0), (2, 64, 3), (1, 130, 1), (2, 200, 70)]


@pytest.mark.parametrize(("layers", "rows", "before"), SIZES)
def test_the_reference_is_the_mean_of_the_whole_matrix(layers, rows, before):
    q, k = drawn(layers, rows, before)
    found = reference.mean_attention(q, k, scale=0.3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), whole(q, k, 0.3), rtol=1e-4, atol=1e-6)


def test_every_row_is_one_and_no_row_sees_a_later_key():
    q, k = drawn(2, 70, 9)
    found = mean_attention(q, k, scale=1.0)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 70))
    assert not found[:, :, 9:].triu(1).any()


@pytest.mark.parametrize(("layers", "rows", "before"), SIZES)
@pytest.mark.parametrize(("heads", "d"), [((6, 2), 16), ((4, 4), 80)])
def test_the_kernel_is_the_mean_of_the_whole_matrix(layers, rows, before, heads, d):
    triton_head_mean = pytest.importorskip("ragkv.kernels.triton_head_mean")
    q, k = drawn(layers, rows, before, heads, d, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    found = triton_head_mean.mean_attention(q.to(DEVICE), k.to(DEVICE), scale=0.3)
    torch.testing.assert_close(found.cpu().double(), whole(q, k, 0.3), rtol=2e-3, atol=1e-5)
