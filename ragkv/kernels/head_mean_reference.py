"""The torch reference of `head_mean.py`: slabs of rows, several layers at a time."""

from __future__ import annotations

import torch
from torch import Tensor

SLAB, SLAB_ON_GPU = 64, 1024
"""Query rows processed at a time. A row of a slab needs no keys behind the slab, so small slabs compute less."""
CELLS, CELLS_ON_GPU = 2**19, 2**26
"""Scores processed at a time. On a CPU they fit into the caches of a core, and suffice for all threads. A GPU has the
memory for more, and small pieces cost mostly kernel launches there."""


def mean_attention(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Compute `head_mean.mean_attention` in torch. Scores are rounded to the dtype of q."""
    layers, rows, q_heads, _ = q.shape
    before, kv_heads = k.shape[1] - rows, k.shape[2]
    most, cells = (SLAB_ON_GPU, CELLS_ON_GPU) if q.is_cuda else (SLAB, CELLS)
    out = torch.zeros(layers, rows, k.shape[1], dtype=torch.float32, device=q.device)
    folded = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [G, Hkv, group, n, d]
    keys = k.permute(0, 2, 3, 1)  # [G, Hkv, d, m + n]
    later = torch.ones(min(most, rows), min(most, rows), dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, rows, most):
        stop = min(start + most, rows)
        count, seen = stop - start, before + stop
        together = max(1, cells // (q_heads * count * seen))
        for first in range(0, layers, together):
            some = slice(first, first + together)
            slab = folded[some, :, :, start:stop].flatten(2, 3).flatten(0, 1)
            scores = torch.baddbmm(
                q.new_empty(()), slab, keys[some, ..., :seen].flatten(0, 1), beta=0, alpha=scale
            ).view(-1, q_heads, count, seen)
            # Every row of the slab sees all keys before the slab.
            scores[..., before + start :].masked_fill_(later[:count, :count], float("-inf"))
            weights = scores.float()  # five times as fast on a CPU as a softmax that converts
            out[some, start:stop, :seen] = torch.softmax(weights, -1).mean(1)
    return out
