"""The operations of `rows.py` for a few rows on a CPU, where an operation costs more than its arithmetic.

The names and signatures are those of the reference. Queries and keys turn together, rows behind each other are written
by slices, and a norm is one reduction. The residual stream stays float32 whatever the products compute in, so decoding
rounds less often than a pass of the reference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragkv.kernels import rows
from ragkv.kernels.decode_step import HeadNorms, gated
from ragkv.types import Shape

__all__ = ["add_norm", "gated", "rope_scatter"]


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `decode_step.add_norm`. The sum is float32; the norm has the dtype of y."""
    total = x.float() + y
    return total, _norm(total, weight, eps, y.dtype)


def rope_scatter(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k: Tensor, v: Tensor, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Compute `rows.rope_scatter`."""
    to = slots.tolist()
    first, count = to[0] if to else -1, len(to)
    if first < 0 or to != list(range(first, first + count)):
        return rows.rope_scatter(qkv, cos, sin, slots, k, v, shape, norms)
    heads = qkv.view(count, -1, shape.head_dim)
    turning = heads[:, : shape.q_heads + shape.kv_heads]
    if norms is not None:
        turning = torch.cat(
            [
                _norm(each, norms.weight[i], norms.eps, each.dtype)
                for i, each in enumerate(turning.tensor_split((shape.q_heads,), 1))
            ],
            1,
        )
    turned = _rotate(turning, cos, sin)
    k[first : first + count], v[first : first + count] = turned[:, shape.q_heads :], heads[:, -shape.kv_heads :]
    return turned[:, : shape.q_heads]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `decode_step.rotate` of x [T, heads, d]."""
    half = x.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
    return torch.addcmul(x * cos[:, None], x.roll(half, -1), signed[:, None])


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute `decode_step.apply_norm`, x / sqrt(mean(x²) + eps) by the length of x, and round it once."""
    size = x.shape[-1]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    if length.numel() == 1:
        return (x * math.sqrt(size / (length.item() ** 2 + size * eps)) * weight).to(dtype)
    return (x * torch.rsqrt(length.square() / size + eps) * weight).to(dtype)
