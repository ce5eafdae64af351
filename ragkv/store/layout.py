"""Where each block of a stored chunk lies: arithmetic only, no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragkv.store.base import Range
from ragkv.types import Shape

BODIES = ("exact", "int8", "fp8")
"""How K and V are stored: every bit, or a byte a number with float16 scales (quantise.py)."""

Part = tuple[int, int, int, int]
"""layer, block, offset and size in bytes: plain numbers, because one question names hundreds."""


@dataclass(frozen=True)
class Layout:
    """The body of a chunk: per layer its blocks one after another, without gaps.

    A block of n tokens is whole rows of `row_bytes`, so a block that begins at a row, in the body or in any buffer cut
    into equal slots, has all its parts at rows:

        exact       n rows K · n rows V                         [2, n, Hkv, d] in `dtype`
        int8, fp8   n rows K · n rows V · 2 rows · s rows       codes [2, n, Hkv, d], a byte each; then, as float16,
                                                                scales of K [Hkv, d] and of V [n, Hkv], zeros behind

    So every (layer, block) is one byte range, adjacent blocks are adjacent bytes, and all full blocks are equally long.
    dtype: of the model, in which blocks come back whatever `body` is.
    """

    shape: Shape
    tokens: int
    block: int
    dtype: torch.dtype
    body: str = "exact"

    def __post_init__(self) -> None:
        """Raises ValueError for a body that there is not, or that this shape cannot have."""
        if self.body not in BODIES:
            raise ValueError(f"body {self.body!r} is none of {', '.join(BODIES)}")
        if self.body != "exact" and self.shape.head_dim % 2:
            raise ValueError(f"{self.body} bodies need an even head size, not {self.shape.head_dim}")

    @property
    def blocks(self) -> int:
        """B: the last one may hold fewer tokens than `block`."""
        return -(-self.tokens // self.block)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer, as stored, without scales."""
        return self.shape.kv_heads * self.shape.head_dim * (self.dtype.itemsize if self.body == "exact" else 1)

    @property
    def full_bytes(self) -> int:
        """Bytes of a block that holds `block` tokens."""
        return self.bytes_of(self.block)

    @property
    def last_bytes(self) -> int:
        """Bytes of the last block."""
        return self.bytes_of(self.tokens - (self.blocks - 1) * self.block)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's body."""
        return (self.blocks - 1) * self.full_bytes + self.last_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of the whole body."""
        return self.shape.layers * self.layer_bytes

    def bytes_of(self, tokens: int) -> int:
        """Bytes of a block of `tokens` tokens."""
        rows = 2 * tokens
        if self.body != "exact":
            rows += 2 + -(-2 * tokens // self.shape.head_dim)
        return rows * self.row_bytes

    def block_tokens(self, block: int) -> int:
        """n_b. Raises ValueError for a block that the chunk has not."""
        if not 0 <= block < self.blocks:
            raise ValueError(f"block {block} of a chunk with {self.blocks} blocks")
        return min(self.block, self.tokens - block * self.block)

    def range(self, layer: int, block: int) -> Range:
        """The bytes of one block of one layer. Raises ValueError for a layer or block that the chunk has not."""
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer {layer} of {self.shape.layers}")
        return Range(layer, block * self.full_bytes, self.bytes_of(self.block_tokens(block)))

    def wanted_bytes(self, wanted: Sequence[Sequence[int]]) -> int:
        """Bytes of the blocks that `wanted` names per layer, ascending: what reading them reads."""
        spared = self.full_bytes - self.last_bytes
        return sum(
            len(blocks) * self.full_bytes - spared * (blocks[-1] == self.blocks - 1) for blocks in wanted if blocks
        )


def parts(layout: Layout, wanted: Sequence[Sequence[int]]) -> list[Part]:
    """The blocks that `wanted` names, layer by layer. Raises ValueError unless each layer's ids exist and ascend."""
    if len(wanted) != layout.shape.layers:
        raise ValueError(f"blocks wanted of {len(wanted)} layers, the chunk has {layout.shape.layers}")
    count, stride, last = layout.blocks, layout.full_bytes, layout.last_bytes
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
