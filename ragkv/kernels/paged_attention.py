"""Attention of a decode step to blocks that several requests read in place (paged attention).

A request attends to the rows of its own cache (`decode_step.py`) and to blocks of stored chunks, which lie in a pool on
the device as they are stored: K before RoPE, in any order. Requests whose contexts have a chunk in common read the same
blocks, although the chunk begins at another position in each of them. RoPE depends on the difference of two positions
alone, so nothing of a request needs to be in a block:

    K is rotated to its position in the chunk           once for all requests
    q is rotated by its distance to the chunk's start   for each request and chunk

A tile lists the blocks of one chunk that some of its requests keep, layer by layer, each with a mask of these requests.
A unit is the work of one program for each kv head: a segment of a tile's blocks for up to `lanes_of` rows of the step.
It reads each block once for all of its rows. Its result for a row is a part, which is merged with the other parts of
the row and with the attention to the row's own cache by their log-sum-exp.

    tile    [L + 1 + 2 E] int64: first entry of each layer and E, address of each entry's block, then for each entry the
            number of the block in its chunk (upper half) and the mask of the requests that keep it (lower half)
    unit    address of the tile, E, tokens of the chunk, number of the segment, then for each lane: row of the step (-1:
            none), bit of its request in the masks, position of the chunk's first token, number of the part

This is the reference, in torch. The Triton kernel (`triton_paged_attention.py`) has the same name and signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers, HeadNorms, apply_norm, rotate
from ragkv.kernels.transfer import TransferFormat, decode_block
from ragkv.types import Shape

ROWS = 64
"""Most rows of queries of one kv head in a unit: those of a tensor core's tile."""
SEGMENT = 512
"""Keys of a segment. Shorter segments occupy more programs, longer ones have fewer parts to merge."""
MASK_BITS = 32
"""Requests that a mask has room for."""
UNIT_FIELDS, LANE_FIELDS = 4, 4
"""Numbers of a unit before its lanes, and of a lane."""


def lanes_of(shape: Shape) -> int:
    """Return how many rows of a step a unit serves, and how many requests a tile has, at most."""
    return min(MASK_BITS, max(1, ROWS // (shape.q_heads // shape.kv_heads)))


def segment_blocks(block: int) -> int:
    """Return how many blocks of so many tokens a segment has."""
    return max(1, SEGMENT // block)


@dataclass(frozen=True)
class PagedBlocks:
    """What a step reads in place, with space for its results. All tensors are on the device.

    Attributes:
        units: [U, UNIT_FIELDS + LANE_FIELDS * lanes] int64. Lane fields lie behind each other, each for all lanes.
        bounds: [1 + W + 1] int64: the number of units, the first part of each row of the step, and their number. The
            parts of a row have consecutive numbers.
        parts: [P, Hq, d] float32. Space for the parts.
        lses: [P, Hq] float32. Their log-sum-exp.
        cos: [positions, d], of all positions, in the dtype of the caches. Both halves of a row are equal.
        sin: likewise.
        lanes: rows of the step that a unit serves at most.
        shape: the model's shape.
        form: format of the blocks.
        version: differs between tables at different addresses.
        pool: [slots, bytes] uint8. Memory of all blocks, for the reference, which cannot read addresses.
        tiles: the tiles by their addresses, likewise.
    """

    units: Tensor
    bounds: Tensor
    parts: Tensor
    lses: Tensor
    cos: Tensor
    sin: Tensor
    lanes: int
    shape: Shape
    form: TransferFormat
    version: int
    pool: Tensor
    tiles: dict[int, Tensor]


@dataclass(frozen=True)
class RawQueries:
    """Queries of a step before RoPE.

    Attributes:
        qkv: [W, (Hq + 2 Hkv) d]. The merged projection of the layer.
        positions: [W] int64, on the device. Position of each row.
        norms: norms of query heads, where the model has them.
    """

    qkv: Tensor
    positions: Tensor
    norms: HeadNorms | None


class PagedAttention(Protocol):
    """`attend_paged` of this module, or the Triton kernel with the same signature."""

    def __call__(
        self,
        q: Tensor,
        raw: RawQueries,
        pointers: CachePointers,
        paged: PagedBlocks,
        layer: int,
        *,
        scale: float,
        splits: int,
    ) -> Tensor:
        """Compute attention."""
        ...


def attend_paged(
    q: Tensor,
    raw: RawQueries,
    pointers: CachePointers,
    paged: PagedBlocks,
    layer: int,
    *,
    scale: float,
    splits: int,
) -> Tensor:
    """Compute attention [W, Hq, d] of each row to its own cache, the new row included, and to its blocks.

    Args:
        q: [W, Hq, d]. The rotated queries.
        raw: the same before RoPE.
        pointers: the caches.
        paged: the blocks.
        layer: the layer.
        scale: factor of the scores.
        splits: as in `decode_step.attend`.
    """
    wide, out = torch.promote_types(q.dtype, torch.float32), torch.empty_like(q)
    shape = paged.shape
    group = shape.q_heads // shape.kv_heads
    queries = raw.qkv.view(raw.qkv.shape[0], -1, shape.head_dim)[:, : shape.q_heads]
    if raw.norms is not None:
        queries = apply_norm(queries, raw.norms.weight[0], raw.norms.eps)
    scores, values = list[list[Tensor]](), list[list[Tensor]]()
    for row, length in enumerate(pointers.table[2, layer].tolist()):
        k, v = (store[layer][row][: length + 1].to(wide) for store in (pointers.k, pointers.v))
        scores.append([_scores(q[row], k, group)])
        values.append([v])
    lanes = paged.lanes
    for unit in paged.units[: int(paged.bounds[0])].tolist():
        rows, bits, starts, _ = (unit[UNIT_FIELDS + i * lanes :][:lanes] for i in range(LANE_FIELDS))
        for number, mask, k, v in _blocks(paged, unit, layer):
            at = slice(number * paged.form.block, number * paged.form.block + k.shape[0])
            k = rotate(k, paged.cos[at], paged.sin[at])
            for row, bit, start in zip(rows, bits, starts, strict=True):
                if row >= 0 and mask >> bit & 1:
                    far = int(raw.positions[row]) - start
                    turned = rotate(queries[row][None], paged.cos[far][None], paged.sin[far][None])[0]
                    scores[row].append(_scores(turned, k.to(wide), group))
                    values[row].append(v.to(wide))
    for row, (row_scores, seen) in enumerate(zip(scores, values, strict=True)):
        weights = (torch.cat(row_scores, dim=-1) * scale).softmax(-1).view(shape.kv_heads, group, -1)
        out[row] = torch.einsum("ghn,ngd->ghd", weights, torch.cat(seen)).reshape(q.shape[1:])
    return out


def _scores(q: Tensor, k: Tensor, group: int) -> Tensor:
    """Return the products [Hq, n] of q [Hq, d] with k [n, Hkv, d]."""
    return torch.einsum("hd,nhd->hn", q.to(k.dtype), k.repeat_interleave(group, dim=1))


def _blocks(paged: PagedBlocks, unit: Sequence[int], layer: int) -> list[tuple[int, int, Tensor, Tensor]]:
    """Return the blocks of a unit: number in the chunk, mask, and K before RoPE and V [n, Hkv, d]."""
    address, entries, tokens, segment = unit[:UNIT_FIELDS]
    tile, block = paged.tiles[address].tolist(), paged.form.block
    most = segment_blocks(block)
    first = tile[layer] + segment * most
    found = []
    for entry in range(first, min(first + most, tile[layer + 1])):
        base = paged.shape.layers + 1
        at, mark = tile[base + entry] - paged.pool.data_ptr(), tile[base + entries + entry]
        number, mask = mark >> 32, mark & 0xFFFFFFFF
        count = min(block, tokens - number * block)
        found.append((number, mask, *decode_block(paged.pool[at // paged.pool.shape[1]], count, paged.form)))
    return found
