"""The Triton kernels of `fp8_linear.py`: they read each weight once, as a byte.

One row is multiplied as it is, number by number. An e4m3 number shifted left by 7 bits is a float16 that is 2^8 too
small (store/format/quantise.py); the row's scale makes up for it. Both are exact.

Several rows are rounded to e4m3 first, and tensor cores multiply bytes with bytes. The weights are the left factor,
because Hopper's products have at least 64 rows on that side. Sums are float32.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragkv.kernels.early_launch import early

STAGES = 4
"""Pieces of the weights that are on their way at a time; three and six took up to 4% longer on an H100."""
TILE, DEPTH = 64, 256
"""Outputs of a program for several rows, and the numbers of a row that it reads at a time (docs/lab-notes.md)."""


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `fp8_linear.linear` of one row x [1, in] in bfloat16, float16 or float32; x and weight are contiguous."""
    size = x.shape[1]
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    tile, depth = 8, min(1024, max(16, triton.next_power_of_2(size)))
    _linear[(triton.cdiv(weight.shape[0], tile),)](
        x, weight.view(torch.int8), scale, scale if bias is None else bias, out, weight.shape[0], size,
        BIAS=bias is not None, TILE=tile, DEPTH=depth, STAGES=STAGES, num_warps=4, num_stages=STAGES, **early(x),
    )  # fmt: skip
    return out


def linear_rounded(
    codes: Tensor, factors: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply rounded rows with a matrix in FP8.

    Args:
        codes: [rows, in] float8_e4m3fn; contiguous. At most 64 rows are quick.
        factors: [rows] float32, scale of each row.
        weight: [out, in] float8_e4m3fn; contiguous.
        scale: [out] float32.
        bias: [out], or None.
        dtype: of the result.

    Returns:
        [rows, out].
    """
    (rows, size), outputs = codes.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=dtype, device=codes.device)
    if not rows:
        return out
    programs = triton.cdiv(outputs, TILE)
    # A program that has a multiprocessor for itself needs more bytes on their way than several that share one.
    stages = 5 if programs <= _multiprocessors(codes.device.index) else 3
    depth = DEPTH if size % DEPTH == 0 else 64
    _linear_rounded[(programs,)](
        codes, factors, weight, scale, scale if bias is None else bias, out, rows, outputs, size,
        BIAS=bias is not None, WHOLE=size % depth == 0 and outputs % TILE == 0,
        ROWS=max(16, triton.next_power_of_2(rows)), TILE=TILE, DEPTH=depth, num_warps=4, num_stages=stages,
        **early(codes),
    )  # fmt: skip
    return out


@cache
def _multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 1


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fp8_linear.quantise_rows`. x must be contiguous."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        wide = triton.next_power_of_2(size)
        _quantise_rows[(rows,)](
            x, codes.view(torch.int8), scale, SIZE=size, WIDE=wide, num_warps=8 if wide > 4096 else 4, **early(x)
        )
    return codes, scale


@triton.jit
def _quantise_rows(x_ptr, coded_ptr, scales_ptr, SIZE: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):
    """Round one row. Its largest number becomes the largest code, 448."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.arange(0, WIDE)
    live = lane < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + lane
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), 448.0), 1.1754943508222875e-38)
    tl.store(coded_ptr + at, _encode(tl.div_rn(x, scale)), mask=live)
    tl.store(scales_ptr + tl.program_id(0), scale)


@triton.jit
def _encode(x):
    """Encode float32 numbers as e4m3 bytes, rounded to the nearest, ties to even."""
    size = tl.minimum(tl.abs(x), 448.0)
    # Three bits of the mantissa stay. The exponent's bias is 7 instead of 127.
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9; the sum has no room for anything finer.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    return (code | tl.where(x < 0, 0x80, 0)).to(tl.int8)


@triton.jit
def _decode(codes):
    """Decode bytes into float16 numbers that are 2^8 too small."""
    return ((codes.to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True)


@triton.jit
def _linear(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, outputs, size,
    BIAS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute TILE outputs of one row.

    Weights, scales and biases do not change, so the first of them are read before the kernel waits for its row.
    """
    if EARLY:
        gdc_launch_dependents()
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    present = output < outputs
    lane = tl.arange(0, DEPTH)
    weights = codes_ptr + output[:, None].to(tl.int64) * size + lane[None, :]
    scale = tl.load(scales_ptr + output, mask=present, other=0.0) * 256.0
    bias = tl.zeros((TILE,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=present, other=0.0).to(tl.float32)
    live = lane < size
    w = tl.load(weights, mask=present[:, None] & live[None, :], other=0)
    if EARLY:
        gdc_wait()
    x = tl.load(x_ptr + lane, mask=live, other=0.0).to(tl.float32)
    total = _decode(w).to(tl.float32) * x[None, :]
    # A loop without `tl.dot` is pipelined only where it says so.
    for start in tl.range(DEPTH, size, DEPTH, num_stages=STAGES):
        live = start + lane < size
        w = tl.load(weights + start, mask=present[:, None] & live[None, :], other=0)
        x = tl.load(x_ptr + start + lane, mask=live, other=0.0).to(tl.float32)
        total += _decode(w).to(tl.float32) * x[None, :]
    found = tl.sum(total, 1) * scale + bias
    tl.store(out_ptr + output, found.to(out_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["rows"])
def _linear_rounded(
    codes_ptr, factors_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, rows, outputs, size,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute TILE outputs of all rows. WHOLE: tiles have no number beyond the matrix."""
    if EARLY:
        gdc_launch_dependents()
    output, row, lane = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, DEPTH)
    present, counts = output < outputs, row < rows
    scale = tl.load(scales_ptr + output, mask=present, other=0.0)
    bias = tl.zeros((TILE,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=present, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    weights = weight_ptr + output[:, None].to(tl.int64) * size + lane[None, :]
    codes = codes_ptr + row[:, None].to(tl.int64) * size + lane[None, :]
    sums = tl.zeros((TILE, ROWS), tl.float32)
    for start in range(0, size, DEPTH):
        if WHOLE:
            w = tl.load(weights + start)
            x = tl.load(codes + start, mask=counts[:, None], other=0.0)
        else:
            live = (start + lane < size)[None, :]
            w = tl.load(weights + start, mask=present[:, None] & live, other=0.0)
            x = tl.load(codes + start, mask=counts[:, None] & live, other=0.0)
        sums = tl.dot(w, tl.trans(x), sums)
    factors = tl.load(factors_ptr + row, mask=counts, other=0.0)
    at = row[None, :].to(tl.int64) * outputs + output[:, None]
    result = sums * scale[:, None] * factors[None, :] + bias[:, None]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=present[:, None] & counts[None, :])
