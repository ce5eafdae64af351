"""Small pieces of attention that several sparse policies use."""

from __future__ import annotations

import torch
from torch import Tensor


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for scores and partial results: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def attend_heads(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with one token to all given keys, each kv head to its own.

    Args:
        q: Queries [H, g, d], grouped by kv head.
        k: Keys [H, m, d].
        v: Values [H, m, d].
        scale: Softmax scale.

    Returns:
        The output [H, g, d] and its log-sum-exp [H, g].
    """
    scores = q @ k.mT.to(q.dtype) * scale
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ v.to(q.dtype), lse
