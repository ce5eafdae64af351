"""The torch reference of `block_sparse.py`. It gathers the keys of one tile after another."""

from __future__ import annotations

import torch
from torch import Tensor

from ragkv.kernels.attention_reference import attend_lse
from ragkv.kernels.block_index import BlockSparseIndex
from ragkv.kernels.decode_step import CachePointers
from ragkv.types import Shape


def attend_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `block_sparse.attend_block_sparse` in torch."""
    heads, tiles = index.counts.shape
    share, group = q.shape[1] // heads, q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
    for head in range(heads):
        q_heads = slice(head * share, (head + 1) * share)
        kv_heads = slice(q_heads.start // group, (q_heads.stop - 1) // group + 1)
        for tile in range(tiles):
            rows = slice(max(0, tile * index.tile - index.offset), (tile + 1) * index.tile - index.offset)
            keys = index.keys(head, tile, k.shape[0])
            keys = keys[k_pos[keys] <= q_pos[rows].max()]
            out[rows, q_heads], lse[rows, q_heads] = attend_lse(
                q[rows, q_heads], k[keys, kv_heads], v[keys, kv_heads], q_pos[rows], k_pos[keys], scale=scale
            )
    return out, lse


def attend_block_sparse_at(
    q: Tensor,
    pointers: CachePointers,
    layer: int,
    shape: Shape,
    q_pos: Tensor,
    k_pos: Tensor,
    index: BlockSparseIndex,
    *,
    scale: float,
) -> Tensor:
    """Compute `block_sparse.attend_block_sparse_at` in torch, over the tensors of `pointers`."""
    rows = int(pointers.table[2, layer, -1]) + 1
    k, v = (store[layer][-1][:rows] for store in (pointers.k, pointers.v))
    return attend_block_sparse(q, k, v, q_pos, k_pos[:rows], index, scale=scale)[0]
