"""What is kept of a chunk, beside its KV, so that blocks can be chosen without loading them. Built once, at ingest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.recompute.analysis import analyse
from ragkv.types import Digest


@dataclass(frozen=True)
class DigestParams:
    """block, local: as in the model profile · retrieval: (layer, kv head) pairs whose token-level keys are kept."""

    block: int
    local: int
    retrieval: tuple[tuple[int, int], ...] = ()


def retrieval_pairs(heads: Sequence[tuple[int, int]], group: int) -> tuple[tuple[int, int], ...]:
    """(layer, kv head) pairs that serve the (layer, query head) pairs; query heads of one group share theirs."""
    return tuple(sorted({(layer, head // group) for layer, head in heads}))


def digest(
    q: Sequence[Tensor], k: Tensor, rotated: Sequence[tuple[Tensor, Tensor]], params: DigestParams, *, scale: float
) -> Digest:
    """Digest of a chunk.

    q: per layer, pre-RoPE [n, Hq, d] · k [L, n, Hkv, d] pre-RoPE · rotated: per layer q [n, Hq, d] and all keys
    [|S| + n, Hkv, d] with RoPE, for the attention analysis.
    """
    rows = k.shape[1]
    blocks = -(-rows // params.block)
    first_local = max(0, blocks - params.local) * params.block
    layers = [analyse(q_l, k_l, block=params.block, before=k_l.shape[0] - rows, scale=scale) for q_l, k_l in rotated]
    pairs = [k[layer, :, head] for layer, head in params.retrieval]
    return Digest(
        mean_keys=block_means(k, params.block),
        local_query=torch.stack([rows_of[first_local:].mean(0) for rows_of in q]),
        alpha=torch.stack([layer.alpha for layer in layers]).cpu(),
        unimportance=torch.stack([layer.unimportance for layer in layers]).cpu(),
        landmarks=torch.stack([layer.landmarks for layer in layers]).cpu(),
        retrieval_keys=torch.stack(pairs) if pairs else k.new_empty(0, rows, k.shape[3]),
    )


def block_means(k: Tensor, block: int) -> Tensor:
    """k [L, n, Hkv, d] -> [L, B, Hkv, d]; a partial last block is averaged over its real tokens."""
    return torch.stack([part.mean(1) for part in k.split(block, dim=1)], dim=1)
