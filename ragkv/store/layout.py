"""Where each block of a stored chunk lies: arithmetic only, no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragkv.store.base import Range
from ragkv.types import Shape

Part = tuple[int, int, int, int]
"""layer, block, offset and size in bytes: plain numbers, because one question names hundreds."""


@dataclass(frozen=True)
class Layout:
    """The body of a chunk: per layer its blocks one after another, without padding.

    Block b is [2, n_b, Hkv, d]: its K, then its V, token after token. So every (layer, block) is one byte range, and
    adjacent blocks are adjacent bytes.
    """

    shape: Shape
    tokens: int
    block: int
    dtype: torch.dtype

    @property
    def blocks(self) -> int:
        """B: the last one may hold fewer tokens than `block`."""
        return -(-self.tokens // self.block)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's body."""
        return 2 * self.tokens * self.row_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of the whole body: the full KV of the chunk."""
        return self.shape.layers * self.layer_bytes

    def block_tokens(self, block: int) -> int:
        """n_b. Raises ValueError for a block that the chunk has not."""
        if not 0 <= block < self.blocks:
            raise ValueError(f"block {block} of a chunk with {self.blocks} blocks")
        return min(self.block, self.tokens - block * self.block)

    def range(self, layer: int, block: int) -> Range:
        """The bytes of one block of one layer. Raises ValueError for a layer or block that the chunk has not."""
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer {layer} of {self.shape.layers}")
        return Range(layer, 2 * block * self.block * self.row_bytes, 2 * self.block_tokens(block) * self.row_bytes)


def parts(layout: Layout, wanted: Sequence[Sequence[int]]) -> list[Part]:
    """The blocks that `wanted` names, layer by layer. Raises ValueError unless each layer's ids exist and ascend."""
    if len(wanted) != layout.shape.layers:
        raise ValueError(f"blocks wanted of {len(wanted)} layers, the chunk has {layout.shape.layers}")
    count, stride = layout.blocks, 2 * layout.block * layout.row_bytes
    last = layout.layer_bytes - (count - 1) * stride
    found = []
    for layer, blocks in enumerate(wanted):
        above = -1
        for block in blocks:
            if not above < block < count:
                raise ValueError(f"layer {layer}: the blocks wanted must ascend and be below {count}")
            found.append((layer, block, block * stride, stride if block < count - 1 else last))
            above = block
    return found


def joined(found: Sequence[Part]) -> list[Range]:
    """Neighbours become one range: fewer reads, same bytes."""
    if not found:
        return []
    ranges = []
    layer, _, start, size = found[0]
    for other, _, offset, more in found[1:]:
        if other == layer and offset == start + size:
            size += more
        else:
            ranges.append(Range(layer, start, size))
            layer, start, size = other, offset, more
    return [*ranges, Range(layer, start, size)]
