"""Operations between the products of a decoded token on a CPU, where an operation costs more than its arithmetic.

They compute what `decode_step.apply_norm` and `decode_step.rotate` do, and round once: the residual stream is float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the RMS norm of x [..., size] times weight [size], by the length of x: x / sqrt(mean(x²) + eps).

    Args:
        x: the rows.
        weight: the weight.
        eps: added to the mean square.
        dtype: dtype of the result; everything before is float32.
    """
    size = x.shape[-1]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    if length.numel() == 1:
        return (x * math.sqrt(size / (length.item() ** 2 + size * eps)) * weight).to(dtype)
    return (x * torch.rsqrt(length.square() / size + eps) * weight).to(dtype)


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, d] as `rotate` takes them [T, 1, d]: the sign of the first half goes with the sin."""
    half = sin.shape[-1] // 2
    return cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [T, heads, d] with `angles`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
