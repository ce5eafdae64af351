"""The byte layout of a stored chunk: where each block lies. This file only calculates; it reads no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.store.base import Range
from ragkv.types import Shape

BODIES = ("exact", "int8", "fp8")
"""How K and V are stored: exactly, or as one byte per number with float16 scales (quantise.py)."""

Part = tuple[int, int, int, int]
"""(layer, block, offset, size), the last two in bytes. Plain numbers, because one load reads hundreds of parts."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BlockRanges:
    """The byte ranges of m different blocks of one chunk.

    They are arrays, because one question names hundreds of blocks, and usually all of them are in memory. Iteration
    yields each block as a `Part`.

    Attributes:
        layer: [m].
        block: [m].
        offset: [m], first byte in the layer's body.
        size: [m], bytes.
        blocks: B, the blocks of the chunk.
        grid: L · B, the blocks of all its layers.
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

    @cached_property
    def cells(self) -> Numbers:
        """[m], the number of each block among the blocks of all layers, counted layer by layer."""
        return self.layer * self.blocks + self.block

    @property
    def bytes(self) -> int:
        """The sum of the sizes."""
        return int(self.size.sum())

    @property
    def layers(self) -> int:
        """L, the layers of the chunk."""
        return self.grid // self.blocks

    @property
    def layer_bytes(self) -> Numbers:
        """[L], the sum of the sizes by layer."""
        return np.bincount(self.layer, self.size, self.layers).astype(np.int64)

    def select(self, which: Numbers) -> BlockRanges:
        """Return the ranges at indices `which`, which must ascend."""
        if which.shape[0] == len(self):  # indices ascend, so these are all
            return self
        layer, block, offset, size = (each[which] for each in (self.layer, self.block, self.offset, self.size))
        return BlockRanges(layer, block, offset, size, self.blocks, self.grid)


@dataclass(frozen=True)
class Layout:
    """The body of a chunk: per layer its blocks, one after another, without gaps.

    A block of n tokens consists of whole rows of `row_bytes` bytes. So when a block begins at a row boundary, in the
    body or in a buffer of equal slots, all its parts begin at row boundaries:

        exact       n rows K · n rows V                         [2, n, Hkv, d] in `dtype`
        int8, fp8   n rows K · n rows V · 2 rows · s rows       codes [2, n, Hkv, d], a byte each; then, as float16,
                                                                scales of K [Hkv, d] and of V [n, Hkv], then zeros

    So every (layer, block) is one byte range, adjacent blocks are adjacent bytes, and all full blocks have one size.

    Attributes:
        shape: Sizes of the model's cache.
        tokens: Tokens of the chunk.
        block: Tokens of a full block.
        dtype: The model's dtype. Blocks are unpacked to it, whatever `body` is.
        body: One of `BODIES`.
        state_bytes: Bytes of the states behind the chunk, in a part of its own behind the last layer; 0 for none.
    """

    shape: Shape
    tokens: int
    block: int
    dtype: torch.dtype
    body: str = "exact"
    state_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown body, or for one that the shape does not allow."""
        if self.body not in BODIES:
            raise ValueError(f"body {self.body!r} is none of {', '.join(BODIES)}")
        if self.body != "exact" and self.shape.head_dim % 2:
            raise ValueError(f"{self.body} bodies need an even head size, not {self.shape.head_dim}")

    @property
    def blocks(self) -> int:
        """B, the number of blocks. The last one may hold fewer than `block` tokens."""
        return -(-self.tokens // self.block)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K, or V, in one layer as stored, without scales."""
        return self.shape.kv_heads * self.shape.head_dim * (self.dtype.itemsize if self.body == "exact" else 1)

    @property
    def full_bytes(self) -> int:
        """Bytes of a full block."""
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
        return self.shape.layers * self.layer_bytes + self.state_bytes

    @property
    def state_range(self) -> Range:
        """The byte range of the states."""
        return Range(self.shape.layers, 0, self.state_bytes)

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of a block of so many tokens."""
        rows = 2 * tokens
        if self.body != "exact":
            rows += 2 + -(-2 * tokens // self.shape.head_dim)
        return rows * self.row_bytes

    def block_tokens(self, block: int) -> int:
        """Return n_b, the tokens of a block. Raises ValueError when the chunk has no such block."""
        if not 0 <= block < self.blocks:
            raise ValueError(f"block {block} of a chunk with {self.blocks} blocks")
        return min(self.block, self.tokens - block * self.block)

    def range(self, layer: int, block: int) -> Range:
        """Return the byte range of one block. Raises ValueError when the chunk has no such layer or block."""
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer {layer} of {self.shape.layers}")
        return Range(layer, block * self.full_bytes, self.bytes_of(self.block_tokens(block)))

    def wanted_bytes(self, requested: Sequence[Sequence[int]]) -> int:
        """Return the bytes of blocks, given per layer as ascending block ids."""
        last = self.blocks - 1
        ends = sum(1 for blocks in requested if blocks and blocks[-1] == last)
        full = self.full_bytes
        return sum(map(len, requested)) * full - ends * (full - self.last_bytes)


def block_ranges(layout: Layout, requested: Sequence[Sequence[int]]) -> BlockRanges:
    """Return the byte ranges of blocks, layer by layer.

    Args:
        layout: The chunk's layout.
        requested: Per layer the block ids.

    Raises:
        ValueError: The ids of a layer do not ascend, or one does not exist.
    """
    layers, count, stride = layout.shape.layers, layout.blocks, layout.full_bytes
    if len(requested) != layers:
        raise ValueError(f"blocks wanted of {len(requested)} layers, the chunk has {layers}")
    if all(blocks is requested[0] for blocks in requested):  # as in most plans
        block = np.broadcast_to(np.array(requested[0], np.int64), (layers, len(requested[0]))).ravel()
        layer = np.arange(layers).repeat(len(requested[0]))
    else:
        layer = np.arange(layers).repeat(np.fromiter(map(len, requested), np.int64, layers))
        block = np.fromiter(chain.from_iterable(requested), np.int64, layer.shape[0])
    size = np.where(block == count - 1, layout.last_bytes, stride)
    ranges = BlockRanges(layer, block, block * stride, size, count, layers * count)
    wrong = (block < 0) | (block >= count)
    wrong[1:] |= ranges.cells[1:] <= ranges.cells[:-1]  # valid ids ascend within their layers when their cells do
    if wrong.any():
        raise ValueError(f"layer {layer[wrong.argmax()]}: the blocks wanted must ascend and be below {count}")
    return ranges


def merge_adjacent(ranges: BlockRanges) -> list[Range]:
    """Merge adjacent blocks into one range each: the same bytes in fewer reads."""
    if not len(ranges):
        return []
    merged = []
    parts = iter(ranges)
    layer, _, start, size = next(parts)
    for next_layer, _, next_start, next_size in parts:
        if next_layer == layer and next_start == start + size:
            size += next_size
        else:
            merged.append(Range(layer, start, size))
            layer, start, size = next_layer, next_start, next_size
    return [*merged, Range(layer, start, size)]
