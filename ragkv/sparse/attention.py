"""Small pieces of attention that several sparse policies use."""

from __future__ import annotations

import torch
from torch import Tensor

from ragkv.kernels.block_sparse import BlockSparseIndex


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


def causal_pairs(q_pos: Tensor, k_pos: Tensor) -> int:
    """Count the query-key pairs of one attention head that causality allows."""
    return int(torch.searchsorted(k_pos.sort().values, q_pos, right=True).sum())


def indexed_pairs(index: BlockSparseIndex, q: Tensor) -> Tensor:
    """Count the query-key pairs that are computed for q [T, Hq, d], over all attention heads.

    Whole tiles are computed against whole blocks. Pairs inside a listed block that causality hides are counted, too.
    """
    rows = torch.full((index.counts.shape[1],), index.tile)
    rows[0] -= index.offset
    rows[-1] -= rows.sum() - q.shape[0]
    keys = index.counts.long() * index.block
    if index.column_counts is not None:
        keys = keys + index.column_counts
    return (keys * rows.to(q.device)).sum() * (q.shape[1] // index.counts.shape[0])
