"""The torch reference of `head_mean.py`: slabs of rows, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

SLAB, SLAB_ON_GPU = 64, 1024
"""Query rows processed at a time. On a CPU the scores of a slab fit into the caches of a core. A GPU has the memory for
more, and small slabs cost mostly kernel launches there."""


def mean_attention(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Compute `head_mean.mean_attention` in torch. Scores are rounded to the dtype of q."""
    layers, rows, q_heads, _ = q.shape
    before, most = k.shape[1] - rows, SLAB_ON_GPU if q.is_cuda else SLAB
    kv_heads, out = k.shape[2], torch.zeros(layers, rows, k.shape[1], dtype=torch.float32, device=q.device)
    folded = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [G, Hkv, group, n, d]
    for layer in range(layers):
        keys = k[layer].permute(1, 2, 0)  # [Hkv, d, m + n]
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            slab, seen = folded[layer, :, :, start:stop].flatten(1, 2), before + stop
            scores = torch.baddbmm(q.new_empty(()), slab, keys[..., :seen], beta=0, alpha=scale)
            scores = scores.view(q_heads, stop - start, seen)
            # Every row of the slab sees all keys before the slab.
            hidden = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
            scores[..., before + start :].masked_fill_(hidden, float("-inf"))
            weights = scores.float()  # five times as fast on a CPU as a softmax that converts
            torch.mean(torch.softmax(weights, -1), 0, out=out[layer, start:stop, :seen])
    return out
