"""Operations of a few rows on a CPU beside the reference."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels import cpu_rows
from ragkv.kernels import rows as reference
from ragkv.kernels.decode_step import HeadNorms
from ragkv.types import Shape

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 16), (14, 2, 8), (3, 1, 20)])
@pytest.mark.parametrize("slots", [[], [7], [2, 3, 4], [7, 0, 3], [5, -1], [-1]])
def test_rows_turn_and_are_written_as_by_the_reference(
    slots: list[int], heads: tuple[int, int, int], normed: bool
) -> None:
    shape, (q_heads, kv_heads, d), count = Shape(1, *heads), heads, len(slots)
    qkv, angle = random(count, (q_heads + 2 * kv_heads) * d), random(count, d // 2, seed=1)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    norms = HeadNorms(random(2, d, seed=2), 1e-6) if normed else None
    found = []
    for kernels in (reference, cpu_rows):
        k, v = random(9, kv_heads, d, seed=3), random(9, kv_heads, d, seed=4)
        to = torch.tensor(slots, dtype=torch.int32)
        found.append((kernels.rope_scatter(qkv, cos, sin, to, k, v, shape, norms), k, v))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 4.0])
def test_a_sum_and_its_norm(count: int, dtype: torch.dtype, eps: float) -> None:
    x, y, weight = (random(*size, seed=i).to(dtype) for i, size in enumerate([(count, 96), (count, 96), (96,)]))
    total, normed = cpu_rows.add_norm(x, y, weight, eps)
    expected = reference.add_norm(x.double(), y.double(), weight.double(), eps)
    assert (total.dtype, normed.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(total.double(), expected[0], rtol=1e-6, atol=1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(normed.double(), expected[1].double(), rtol=rounding, atol=1e-5)


def test_a_second_sum_is_not_rounded_to_the_products_dtype() -> None:
    x, y, weight = torch.full((1, 32), 256.0), torch.full((1, 32), 0.5).bfloat16(), torch.ones(32).bfloat16()
    assert (cpu_rows.add_norm(x, y, weight, 1e-6)[0] == 256.5).all()
