"""What the device knows of the blocks of the requests that are decoded over a pool (kv_pool.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ragkv.types import Shape


@dataclass(frozen=True)
class BlockIndex:
    """Tensors of P places with at most B blocks a layer.

    Attributes:
        near: [2, L, P, N, Hkv, d]. K and V of near rows.
        digests: [L, P, Hkv, B, 2d]. Center and radius of the box of a full block.
        hidden: [L, P, B] bool. Blocks that are not ranked because they are near or do not exist.
        threshold: [P] float32. Coverage above which reading stops.
        order: [L, P, Hkv, B] int64. The order of the last step.
        read: [L, P, Hkv] int32. Blocks that the last step read.
        ahead: [L, P, Hkv] int32. Blocks that were loaded ahead of the last step.
        counts: [P, 3] int64. Blocks read, missed and loaded ahead since the request joined.
    """

    near: Tensor
    digests: Tensor
    hidden: Tensor
    threshold: Tensor
    order: Tensor
    read: Tensor
    ahead: Tensor
    counts: Tensor

    def copy_from(self, smaller: BlockIndex) -> None:
        """Copy the places and blocks of a smaller index. What is beyond them stays."""
        for field in fields(self):
            one, other = getattr(self, field.name), getattr(smaller, field.name)
            one[tuple(slice(0, size) for size in other.shape)] = other


@torch.inference_mode(False)
def make_block_index(
    shape: Shape, dtype: torch.dtype, device: torch.device, near_rows: int, sizes: tuple[int, int]
) -> BlockIndex:
    """Allocate an index without requests. It can be changed inside and outside of inference mode.

    Args:
        shape: the model's shape.
        dtype: dtype of K and V.
        device: where the index is.
        near_rows: near rows of a place, N.
        sizes: places P and blocks B.
    """
    layers, heads, d, (count, blocks) = shape.layers, shape.kv_heads, shape.head_dim, sizes
    return BlockIndex(
        near=torch.zeros(2, layers, count, near_rows, heads, d, dtype=dtype, device=device),
        digests=torch.zeros(layers, count, heads, blocks, 2 * d, dtype=dtype, device=device),
        hidden=torch.ones(layers, count, blocks, dtype=torch.bool, device=device),
        threshold=torch.ones(count, dtype=torch.float32, device=device),
        order=torch.zeros(layers, count, heads, blocks, dtype=torch.int64, device=device),
        read=torch.zeros(layers, count, heads, dtype=torch.int32, device=device),
        ahead=torch.zeros(layers, count, heads, dtype=torch.int32, device=device),
        counts=torch.zeros(count, 3, dtype=torch.int64, device=device),
    )
