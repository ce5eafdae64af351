"""Products with weights in FP8: rounding, the reference and the Triton kernel beside the restored matrix in float64."""

from __future__ import annotations

import pytest
import torch

from ragkv.kernels.fp8_linear import FEW, FP8, LARGEST, linear, linear_reference, quantise_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def triton_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """One row as it is; several are rounded, by the reference."""
    kernels = pytest.importorskip("ragkv.kernels.triton_fp8_linear")
    if x.shape[0] == 1:
        return kernels.linear(x, weight, scale, bias)
    codes, factors = quantise_rows(x)
    return kernels.linear_rounded(codes, factors, weight, scale, bias, x.dtype)


IMPLEMENTATIONS = {"reference": linear_reference, "triton": triton_linear}


def test_each_row_has_a_scale_of_its_own_and_is_off_by_a_sixteenth_at_most() -> None:
    x = drawn(40, 64) * torch.logspace(-6, 4, 40)[:, None]
    codes, scale = quantise_rows(x)
    assert (codes.dtype, scale.dtype) == (FP8, torch.float32)
    assert (codes.float().abs().amax(1) == LARGEST).all(), "the largest number of a row is the largest code"
    bound = torch.maximum(x.abs() / 16, scale[:, None] / 1024)
    assert ((codes.float() * scale[:, None] - x).abs() <= bound * 1.001).all()


def test_a_row_of_zeros_stays_zeros() -> None:
    codes, scale = quantise_rows(torch.zeros(2, 16))
    assert not codes.float().any()
    assert scale.isfinite().all()


@pytest.mark.parametrize(("rows", "size"), [(0, 16), (1, 16), (5, 48), (3, 1040)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_rows_as_the_reference_does(rows: int, size: int, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("ragkv.kernels.triton_fp8_linear")
    x = (drawn(rows, size) * torch.logspace(-5, 5, rows)[:, None]).to(dtype)
    if rows > 1:
        x[1] = 0
    if rows > 2:  # every code, and every number half-way between two of them
        codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        both = torch.cat([codes, -codes, (codes[1:] + codes[:-1]) / 2])[-size:]
        x[2, : len(both)], x[2, 0] = both.to(dtype), LARGEST
    codes, scale = kernels.quantise_rows(x.to(DEVICE))
    expected, scales = quantise_rows(x)
    assert torch.equal(codes.cpu().float(), expected.float())
    assert torch.equal(scale.cpu(), scales)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "outputs"),
    [(0, 32, 16), (1, 48, 40), (1, 1040, 24), (3, 160, 70), (17, 144, 48), (5, 512, 128), (64, 256, 64)],
)
def test_a_product_is_that_of_the_restored_matrix(
    implementation: str, bias: bool, rows: int, size: int, outputs: int
) -> None:
    weight, scale = quantise_rows(drawn(outputs, size))
    x, added = drawn(rows, size, seed=1).to(DEVICE, WIDE), drawn(outputs, seed=2).to(DEVICE, WIDE) if bias else None
    if implementation == "triton" and rows > 1:
        codes, factors = quantise_rows(x)
        exact = codes.double() * factors.double()[:, None]
    else:
        exact = x.double()
    expected = exact @ (weight.double() * scale.double()[:, None]).T.to(DEVICE)
    expected = expected if added is None else expected + added.double()
    found = IMPLEMENTATIONS[implementation](x, weight.to(DEVICE), scale.to(DEVICE), added)
    assert found.dtype == x.dtype
    tolerance = 1e-5 if torch.float32 == WIDE else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * size**0.5)


@pytest.mark.parametrize("code", range(256))
def test_the_kernel_reads_every_code_as_torch_does(code: int) -> None:
    if code & 0x7F == 0x7F:
        pytest.skip("not a number")
    weight = torch.full((16, 16), code, dtype=torch.uint8).view(FP8)
    found = triton_linear(torch.eye(16)[:1].to(DEVICE), weight.to(DEVICE), torch.ones(16).to(DEVICE), None)
    assert (found.cpu() == weight[0].float()).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1, 700])
def test_on_a_gpu_several_rows_are_rounded_and_one_is_not(rows: int) -> None:
    weight, scale = quantise_rows(drawn(256, 512))
    x = drawn(rows, 512, seed=1).to(DEVICE, torch.bfloat16)
    expected = linear_reference(x.float(), weight.to(DEVICE), scale.to(DEVICE), None)
    found = linear(x, weight.to(DEVICE), scale.to(DEVICE), None).float()
    error = float((found - expected).norm() / expected.norm())
    assert error < (5e-3 if rows == 1 else 4e-2)
    assert error > 5e-3 or rows == 1
