"""Where each block of a stored chunk lies: arithmetic only, no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.store.base import Range
from ragkv.types import Shape

BODIES = ("exact", "int8", "fp8")
"""How K and V are stored: every bit, or a byte a number with float16 scales (quantise.py)."""

Part = tuple[int, int, int, int]
"""layer, block, offset and size in bytes: plain numbers, because a load reads hundreds."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BlockRanges:
    """Blocks of one chunk, m of them, none twice: arrays, because one question names hundreds, and as a rule all of
    them are in memory. Iterating gives each as a `Part`.

    layer, block [m] · offset, size [m]: bytes in the layer's body · blocks: B of the chunk · grid: its L · B.
    """

    layer: Numbers
    block: Numbers
    offset: Numbers
    size: Numbers
    blocks: int
    grid: int

    def __len__(self) -> int:
        return len(self.layer)

    def __iter__(self) -> Iterator[Part]:
        return zip(self.layer.tolist(), self.block.tolist(), self.offset.tolist(), self.size.tolist(), strict=True)

    @property
    def cells(self) -> Numbers:
        """[m], each block's number among all of the chunk, layer by layer."""
        return self.layer * self.blocks + self.block

    @property
    def bytes(self) -> int:
        """Of all."""
        return int(self.size.sum())

    def some(self, which: Numbers) -> BlockRanges:
        """Those at places `which`."""
        if which.shape[0] == len(self):  # places ascend, so these are all
            return self
        layer, block, offset, size = (each[which] for each in (self.layer, self.block, self.offset, self.size))
        return BlockRanges(layer, block, offset, size, self.blocks, self.grid)


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
        last = self.blocks - 1
        ends = sum(1 for blocks in wanted if blocks and blocks[-1] == last)
        full = self.full_bytes
        return sum(map(len, wanted)) * full - ends * (full - self.last_bytes)


def block_ranges(layout: Layout, wanted: Sequence[Sequence[int]]) -> BlockRanges:
    """The blocks that `wanted` names, layer by layer. Raises ValueError unless each layer's ids exist and ascend."""
    layers, count, stride = layout.shape.layers, layout.blocks, layout.full_bytes
    if len(wanted) != layers:
        raise ValueError(f"blocks wanted of {len(wanted)} layers, the chunk has {layers}")
    layer = np.arange(layers).repeat(np.fromiter(map(len, wanted), np.int64, layers))
    block = np.fromiter(chain.from_iterable(wanted), np.int64, layer.shape[0])
    cells = layer * count + block
    wrong = (block < 0) | (block >= count)
    wrong[1:] |= cells[1:] <= cells[:-1]  # ids that exist ascend in their layers when their cells do
    if wrong.any():
        raise ValueError(f"layer {layer[wrong.argmax()]}: the blocks wanted must ascend and be below {count}")
    size = np.where(block == count - 1, layout.last_bytes, stride)
    return BlockRanges(layer, block, block * stride, size, count, layers * count)


def joined(found: BlockRanges) -> list[Range]:
    """Neighbours become one range: fewer reads, same bytes."""
    if not len(found):
        return []
    ranges = []
    each = iter(found)
    layer, _, start, size = next(each)
    for other, _, offset, more in each:
        if other == layer and offset == start + size:
            size += more
        else:
            ranges.append(Range(layer, start, size))
            layer, start, size = other, offset, more
    return [*ranges, Range(layer, start, size)]
