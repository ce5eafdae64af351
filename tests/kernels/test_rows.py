"""Operations of a pass of many rows: the reference and the Triton kernel."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels import rows as reference
from ragkv.kernels.decode_step import HeadNorms
from ragkv.types import Shape

triton_rows = pytest.importorskip("ragkv.kernels.triton_rows")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 16), (14, 2, 8), (3, 1, 20), (32, 8, 128)])
@pytest.mark.parametrize("count", [1, 5])
def test_the_triton_kernel_equals_the_reference(count, heads, normed):
    shape = Shape(1, *heads)
    q_heads, kv_heads, d = heads
    qkv, angle = random(count, (q_heads + 2 * kv_heads) * d), random(count, d // 2, seed=1)
    cos, sin = (each.repeat(1, 2).contiguous() for each in (angle.cos(), angle.sin()))
    norms = HeadNorms(random(2, d, seed=2), 1e-6) if normed else None
    slots = torch.tensor([7, -1, 0, 3, -1][:count], dtype=torch.int32, device=DEVICE)
    found = []
    for kernels in (reference, triton_rows):
        k, v = random(9, kv_heads, d, seed=3), random(9, kv_heads, d, seed=4)
        found.append((kernels.rope_scatter(qkv, cos, sin, slots, k, v, shape, norms), k, v))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    written = [slot for slot in slots.tolist() if slot >= 0]
    before = random(9, kv_heads, d, seed=4)
    for row in range(9):
        assert torch.equal(found[1][2][row], before[row]) is (row not in written)


def test_no_rows_are_nothing_to_do():
    shape, nothing = Shape(1, 4, 2, 16), torch.empty(0, 16, device=DEVICE)
    k, v = random(3, 2, 16), random(3, 2, 16)
    slots = torch.empty(0, dtype=torch.int32, device=DEVICE)
    out = triton_rows.rope_scatter(torch.empty(0, 128, device=DEVICE), nothing, nothing, slots, k, v, shape, None)
    assert out.shape == (0, 4, 16)
    assert torch.equal(k, random(3, 2, 16))
