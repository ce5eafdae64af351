"""The Triton kernel of `fp8_linear.py` for few rows: it reads each weight once, as a byte.

An e4m3 number shifted left by 7 bits is a float16 that is 2^8 too small (store/format/quantise.py); the row's scale
makes up for it. Both are exact, and so is the conversion to bfloat16. Sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragkv.kernels.early_launch import early

STAGES = 4
"""Pieces of the weights that are on their way at a time; three and six took up to 4% longer on an H100."""


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `fp8_linear.linear`. x and weight must be contiguous, and x in bfloat16, float16 or float32."""
    rows, size = x.shape
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype, device=x.device)
    if not rows:
        return out
    one = rows == 1
    tile, depth = (8, 1024) if one else (32, 128)
    _linear[(triton.cdiv(weight.shape[0], tile),)](
        x, weight.view(torch.int8), scale, scale if bias is None else bias, out, rows, weight.shape[0], size,
        BIAS=bias is not None, ONE=one, ROWS=max(16, triton.next_power_of_2(rows)),
        TILE=tile, DEPTH=min(depth, max(16, triton.next_power_of_2(size))), EXACT=x.dtype == torch.float32,
        STAGES=STAGES, num_warps=4, num_stages=STAGES, **early(x),
    )  # fmt: skip
    return out


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fp8_linear.quantise_rows`. x must be contiguous."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        wide = triton.next_power_of_2(size)
        _quantise_rows[(rows,)](
            x, codes.view(torch.int8), scale, SIZE=size, WIDE=wide, num_warps=8 if wide > 4096 else 4
        )
    return codes, scale


@triton.jit
def _quantise_rows(x_ptr, coded_ptr, scales_ptr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Round one row. Its largest number becomes the largest code, 448."""
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


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, rows, outputs, size,
    BIAS: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute TILE outputs of all rows. One row is multiplied number by number, several on tensor cores.

    Weights, scales and biases do not change, so the first of them are read before the kernel waits for its rows.
    """
    if EARLY:
        gdc_launch_dependents()
    kind: tl.constexpr = x_ptr.dtype.element_ty
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    present = output < outputs
    lane = tl.arange(0, DEPTH)
    weights = codes_ptr + output[:, None].to(tl.int64) * size + lane[None, :]
    scale = tl.load(scales_ptr + output, mask=present, other=0.0) * 256.0
    bias = tl.zeros((TILE,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=present, other=0.0).to(tl.float32)
    if ONE:
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
        tl.store(out_ptr + output, found.to(kind), mask=present)
    else:
        if EARLY:
            gdc_wait()
        row = tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, TILE), tl.float32)
        for start in range(0, size, DEPTH):
            live = start + lane < size
            w = tl.load(weights + start, mask=present[:, None] & live[None, :], other=0)
            inside = (row < rows)[:, None] & live[None, :]
            x = tl.load(x_ptr + row[:, None] * size + start + lane[None, :], mask=inside, other=0.0)
            if EXACT:
                sums = tl.dot(x, tl.trans(_decode(w).to(tl.float32)), sums, input_precision="ieee")
            else:
                sums = tl.dot(x, tl.trans(_decode(w).to(kind)), sums)
        both = (row < rows)[:, None] & present[None, :]
        at = row[:, None].to(tl.int64) * outputs + output[None, :]
        tl.store(out_ptr + at, (sums * scale[None, :] + bias[None, :]).to(kind), mask=both)
