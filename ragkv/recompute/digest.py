"""The digest of a chunk, with which blocks are selected without loading their KV. It is built once, at ingest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.recompute.analysis import Axis, Constant, analyse
from ragkv.types import Digest

MOST_CELLS, MOST_CELLS_ON_GPU = 2**18, 2**26
"""Cells of the attention of the layers that are analysed together: 8 MiB, and 256 MiB on a GPU."""


@dataclass(frozen=True)
class DigestParams:
    """Parameters of a digest.

    Attributes:
        block: Tokens per block, as in the model profile.
        local: Local blocks, as in the model profile.
        retrieval: (layer, kv head) pairs whose token-level keys are stored.
        axis: Axis of the power law of SamKV's importance, as in the model profile (paper silent).
        constant: Its constant, likewise.
    """

    block: int
    local: int
    retrieval: tuple[tuple[int, int], ...] = ()
    axis: Axis = "row"
    constant: Constant = "free"


def retrieval_pairs(heads: Sequence[tuple[int, int]], group: int) -> tuple[tuple[int, int], ...]:
    """Return the (layer, kv head) pairs of (layer, query head) pairs. The query heads of a group share one pair."""
    return tuple(sorted({(layer, head // group) for layer, head in heads}))


def build_digest(
    q: Sequence[Tensor], k: Tensor, rotated: Iterable[tuple[Tensor, Tensor]], params: DigestParams, *, scale: float
) -> Digest:
    """Build the digest of a chunk.

    Args:
        q: Pre-RoPE queries [n, Hq, d], per layer.
        k: Pre-RoPE keys [L, n, Hkv, d].
        rotated: For the attention analysis, groups of G successive layers that together are all layers: queries
            [G, n, Hq, d] and all keys [G, |S| + n, Hkv, d] with RoPE.
        params: Parameters of the digest.
        scale: Softmax scale.

    Returns:
        The digest, on the device of k.
    """
    rows = k.shape[1]
    blocks = -(-rows // params.block)
    first_local = max(0, blocks - params.local) * params.block
    layers = [
        analyse(
            q_g,
            k_g,
            block=params.block,
            before=k_g.shape[1] - rows,
            scale=scale,
            axis=params.axis,
            constant=params.constant,
        )
        for q_g, k_g in rotated
    ]
    pairs = [k[layer, :, head] for layer, head in params.retrieval]
    return Digest(
        mean_keys=block_means(k, params.block),
        local_query=torch.stack([queries[first_local:] for queries in q]).mean(1),
        alpha=torch.cat([layer.alpha for layer in layers]),
        unimportance=torch.cat([layer.unimportance for layer in layers]),
        landmarks=torch.cat([layer.landmarks for layer in layers]),
        retrieval_keys=torch.stack(pairs) if pairs else k.new_empty(0, rows, k.shape[3]),
    )


def layers_at_once(rows: int, keys: int, device: torch.device) -> int:
    """Return how many layers are analysed together, of a chunk of `rows` rows that see `keys` keys.

    On a CPU their attention stays in the caches. On a GPU each launch costs more than a layer's work.
    """
    return max(1, (MOST_CELLS_ON_GPU if device.type == "cuda" else MOST_CELLS) // (rows * keys))


def block_means(k: Tensor, block: int) -> Tensor:
    """Average k [L, n, Hkv, d] by block: [L, B, Hkv, d]. A partial last block is averaged over its real tokens."""
    whole = k.shape[1] // block * block
    means = k[:, :whole].unflatten(1, (-1, block)).mean(2)
    return means if whole == k.shape[1] else torch.cat([means, k[:, whole:].mean(1, keepdim=True)], dim=1)
