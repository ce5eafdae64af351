"""The Triton kernel of `rows.py`: head norms, RoPE and cache writes in one launch for all rows of a pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ragkv.kernels import triton_decode_step
from ragkv.kernels.decode_step import HeadNorms
from ragkv.types import Shape

add_norm, gated = triton_decode_step.add_norm, triton_decode_step.gated

HEADS = 8
"""Heads of a row that a program handles: queries first, then keys, then values."""


def rope_scatter(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k: Tensor, v: Tensor, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Compute `rows.rope_scatter`.

    All tensors must be contiguous and have the dtype of the caches, slots int32. The head size must be even.
    """
    count, d = qkv.shape[0], shape.head_dim
    q = qkv.new_empty(count, shape.q_heads, d)
    if not count:
        return q
    weight, eps = (cos, 0.0) if norms is None else (norms.weight, norms.eps)  # a placeholder, not read
    _rope_scatter[(count, triton.cdiv(shape.q_heads + 2 * shape.kv_heads, HEADS))](
        qkv, cos, sin, weight, slots, q, k, v, eps,
        NORMED=norms is not None, Q_HEADS=shape.q_heads, KV_HEADS=shape.kv_heads, D=d,
        WIDE=triton.next_power_of_2(d // 2), HEADS=HEADS, num_warps=2,
    )  # fmt: skip
    return q


@triton.jit
def _rope_scatter(
    qkv_ptr, cos_ptr, sin_ptr, weight_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, eps,
    NORMED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one row and store them. low, high: the halves of a head that RoPE rotates."""
    HALF: tl.constexpr = D // 2
    ALL: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, WIDE)[None, :]
    half = (lane < HALF) & (head >= 0)
    live = half & (head < ALL)
    at = qkv_ptr + row * (ALL * D) + head * D + lane
    low = tl.load(at, mask=live, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * D + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * D + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    normed_low, normed_high = low, high
    if NORMED:
        norm = weight_ptr + (head >= Q_HEADS).to(tl.int32) * D + lane
        shrink = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        normed_low = (low * shrink).to(kind).to(tl.float32) * tl.load(norm, mask=live, other=0.0)
        normed_high = (high * shrink).to(kind).to(tl.float32) * tl.load(norm + HALF, mask=live, other=0.0)
        normed_low, normed_high = normed_low.to(kind).to(tl.float32), normed_high.to(kind).to(tl.float32)
    rotated_low = (normed_low * cos).to(kind).to(tl.float32) - (normed_high * sin).to(kind).to(tl.float32)
    rotated_high = (normed_high * cos).to(kind).to(tl.float32) + (normed_low * sin).to(kind).to(tl.float32)

    is_query = (head < Q_HEADS) & half
    to = q_ptr + row * (Q_HEADS * D) + head * D + lane
    tl.store(to, rotated_low.to(kind), mask=is_query)
    tl.store(to + HALF, rotated_high.to(kind), mask=is_query)
    slot = tl.load(slots_ptr + row + 0 * lane).to(tl.int64)
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS) & half & (slot >= 0)
    to = k_ptr + (slot * KV_HEADS + head - Q_HEADS) * D + lane
    tl.store(to, rotated_low.to(kind), mask=is_key)
    tl.store(to + HALF, rotated_high.to(kind), mask=is_key)
    is_value = (head >= Q_HEADS + KV_HEADS) & live & (slot >= 0)
    to = v_ptr + (slot * KV_HEADS + head - Q_HEADS - KV_HEADS) * D + lane
    tl.store(to, low.to(kind), mask=is_value)
    tl.store(to + HALF, high.to(kind), mask=is_value)
