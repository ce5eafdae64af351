"""Causal attention of a chunk, averaged over the attention heads.

The attention of single heads is never in memory as a whole: only the mean is kept.

    q [G, n, Hq, d]   k [G, m + n, Hkv, d]   out [G, n, m + n] float32
    G layers; row i sees the first m + i + 1 keys; query head h reads key head h // (Hq // Hkv)

The Triton kernel (`triton_head_mean.py`) runs on a GPU, the reference (`head_mean_reference.py`) elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragkv.kernels import head_mean_reference


def mean_attention(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Compute the attention of every row, as its mean over the attention heads.

    Args:
        q: [G, n, Hq, d]. Rotated queries of G layers.
        k: [G, m + n, Hkv, d]. Rotated keys; the first m precede the chunk.
        scale: softmax scale.

    Returns:
        [G, n, m + n] float32; zero where a row does not see a key.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from ragkv.kernels import triton_head_mean

        return triton_head_mean.mean_attention(q, k, scale=scale)
    return head_mean_reference.mean_attention(q, k, scale=scale)
