"""Operations of a decoded token on a CPU beside formulas in float64 and the reference of a decode step."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels import cpu_rows, decode_step

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 96), (3, 96), (2, 5, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 4.0])
def test_a_norm_is_that_of_the_reference_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, eps: float) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1).to(dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    found = cpu_rows.norm(x, weight, eps, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_rows_turn_as_by_the_reference(count: int) -> None:
    x, angle = random(count, 3, 16), random(count, 8, seed=1)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    expected = decode_step.rotate(x, cos, sin)
    torch.testing.assert_close(cpu_rows.rotate(x, *cpu_rows.angles(cos, sin)), expected, rtol=1e-5, atol=1e-6)
