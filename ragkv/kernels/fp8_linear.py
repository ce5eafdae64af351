"""Products with weights in FP8.

    weight [out, in] float8_e4m3fn, scale [out] float32: row i of the matrix is weight[i] * scale[i]

A product of few rows takes as long as reading its weights, so a byte a weight takes half the time of two. On a GPU one
row is multiplied as it is. Several rows are rounded to FP8, each with a scale of its own, and multiplied on tensor
cores: up to `FEW` by a kernel that is bound by the bytes of the weights (both in `triton_fp8_linear.py`), more by
`torch._scaled_mm`, which is bound by its arithmetic. Elsewhere the reference of this file restores the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
FEW = 64
"""Rows up to which the kernel for few rows is the faster one; measured on an H100 (docs/lab-notes.md)."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to FP8, each row with a scale of its own.

    Args:
        x: [rows, in], finite.

    Returns:
        codes [rows, in] float8_e4m3fn and scales [rows] float32. An element differs from `codes * scales` by at most a
        sixteenth of itself or 1/1024 of the row's largest scale step, whichever is larger.
    """
    wide = x.float()
    scale = wide.abs().amax(1).div(LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(FP8), scale


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows x [T, in] with a matrix in FP8; return [T, out] in the dtype of x.

    Args:
        x: rows; contiguous.
        weight: [out, in] float8_e4m3fn.
        scale: [out] float32.
        bias: [out], or None.
    """
    if not x.is_cuda:
        return linear_reference(x, weight, scale, bias)
    from ragkv.kernels import triton_fp8_linear

    if x.shape[0] == 1:
        return triton_fp8_linear.linear(x, weight, scale, bias)
    codes, factors = triton_fp8_linear.quantise_rows(x)
    if x.shape[0] <= FEW:
        return triton_fp8_linear.linear_rounded(codes, factors, weight, scale, bias, x.dtype)
    out = torch._scaled_mm(
        codes, weight.T, scale_a=factors[:, None], scale_b=scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return (out if bias is None else out + bias).to(x.dtype)


def linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` in torch: the weights are restored, and sums are float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) @ weight.to(wide).mul_(scale[:, None]).T
    return (out if bias is None else out + bias).to(x.dtype)
