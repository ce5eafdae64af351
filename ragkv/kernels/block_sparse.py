"""Block-sparse attention: each tile of queries reads the blocks and columns of its index and nothing else.

The Triton kernel (`triton_block_sparse.py`) runs on a GPU, the reference (`block_sparse_reference.py`) elsewhere and in
float64. Both have the functions of this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragkv.kernels import block_sparse_reference
from ragkv.kernels.block_index import BlockSparseIndex
from ragkv.kernels.decode_step import CachePointers
from ragkv.types import Shape


def attend_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to those indexed keys that are not after them.

    Args:
        q: [T, Hq, d].
        k: [n, Hkv, d].
        v: [n, Hkv, d].
        q_pos: [T] int64. The kernel copies them to the device of q, unless they are there as int32.
        k_pos: [n] int64, likewise.
        index: the keys that each tile of queries reads.
        scale: factor of the scores.

    Returns:
        The output [T, Hq, d] and the log-sum-exp [T, Hq] (natural logarithm, at least float32). A query that sees no
        indexed key gives output 0 and log-sum-exp -inf.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from ragkv.kernels import triton_block_sparse

        return triton_block_sparse.attend_block_sparse(q, k, v, q_pos, k_pos, index, scale=scale)
    return block_sparse_reference.attend_block_sparse(q, k, v, q_pos, k_pos, index, scale=scale)


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
    """Compute `attend_block_sparse` over a cache that is found by address.

    The keys are the rows that the last request of `pointers` holds in the layer, the new row included. k_pos may be
    longer than that.

    Returns:
        The output [T, Hq, d].
    """
    if q.is_cuda and q.dtype != torch.float64:
        from ragkv.kernels import triton_block_sparse

        return triton_block_sparse.attend_block_sparse_at(q, pointers, layer, shape, q_pos, k_pos, index, scale=scale)
    return block_sparse_reference.attend_block_sparse_at(q, pointers, layer, shape, q_pos, k_pos, index, scale=scale)
