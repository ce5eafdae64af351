"""The digest of a chunk, with which blocks are selected without loading their KV. It is built once, at ingest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.recompute.analysis import Axis, analyse
from ragkv.types import Digest


@dataclass(frozen=True)
class DigestParams:
    """Parameters of a digest.

    Attributes:
        block: Tokens per block, as in the model profile.
        local: Local blocks, as in the model profile.
        retrieval: (layer, kv head) pairs whose token-level keys are stored.
        axis: Axis of the power law of SamKV's importance, as in the model profile (paper silent).
    """

    block: int
    local: int
    retrieval: tuple[tuple[int, int], ...] = ()
    axis: Axis = "row"


def retrieval_pairs(heads: Sequence[tuple[int, int]], group: int) -> tuple[tuple[int, int], ...]:
    """Return the (layer, kv head) pairs of (layer, query head) pairs. The query heads of a group share one pair."""
    return tuple(sorted({(layer, head // group) for layer, head in heads}))


def build_digest(
    q: Sequence[Tensor], k: Tensor, rotated: Sequence[tuple[Tensor, Tensor]], params: DigestParams, *, scale: float
) -> Digest:
    """Build the digest of a chunk.

    Args:
        q: Pre-RoPE queries [n, Hq, d], per layer.
        k: Pre-RoPE keys [L, n, Hkv, d].
        rotated: Per layer, for the attention analysis: queries [n, Hq, d] and all keys [|S| + n, Hkv, d] with RoPE.
        params: Parameters of the digest.
        scale: Softmax scale.
    """
    rows = k.shape[1]
    blocks = -(-rows // params.block)
    first_local = max(0, blocks - params.local) * params.block
    layers = [
        analyse(q_l, k_l, block=params.block, before=k_l.shape[0] - rows, scale=scale, axis=params.axis)
        for q_l, k_l in rotated
    ]
    pairs = [k[layer, :, head] for layer, head in params.retrieval]
    return Digest(
        mean_keys=block_means(k, params.block),
        local_query=torch.stack([queries[first_local:].mean(0) for queries in q]),
        alpha=torch.stack([layer.alpha for layer in layers]).cpu(),
        unimportance=torch.stack([layer.unimportance for layer in layers]).cpu(),
        landmarks=torch.stack([layer.landmarks for layer in layers]).cpu(),
        retrieval_keys=torch.stack(pairs) if pairs else k.new_empty(0, rows, k.shape[3]),
    )


def block_means(k: Tensor, block: int) -> Tensor:
    """Average k [L, n, Hkv, d] by block: [L, B, Hkv, d]. A partial last block is averaged over its real tokens."""
    return torch.stack([part.mean(1) for part in k.split(block, dim=1)], dim=1)
