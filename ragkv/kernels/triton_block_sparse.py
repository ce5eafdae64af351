"""The Triton kernel of `block_sparse.py`: flash attention in which every tile of queries reads its own list of blocks.

One program handles `ROWS` queries of `FOLD` query heads. It reads block numbers, gathers `KEYS` keys and values at a
time (several blocks where blocks are small; a column is a block of one row), and keeps the running maximum, sum and
output of the softmax in float32. Positions decide what is visible, so the order of cache rows does not matter.
Exponentials use base 2 internally; the returned log-sum-exp is natural.

Few queries over many keys would leave most of a GPU idle. In that case several programs share a list, and a second
kernel merges their partial results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragkv.kernels import triton_block_sparse_tma
from ragkv.kernels.block_index import BlockSparseIndex
from ragkv.kernels.block_sparse_launch import count_splits, launch_shape
from ragkv.kernels.decode_step import CachePointers
from ragkv.types import Shape

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2147483647)
"""Position of a missing key."""
CHANGING = ("count", "keys", "entry", "plane", "most_blocks", "most_columns", "all_blocks", "tiles", "offset")
"""Arguments that differ between requests. Triton must not compile another kernel where one is 1 or a multiple of 16."""


def attend_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `block_sparse.attend_block_sparse`. The output has the dtype of q.

    Positions must be below 2**31. The tile must be a power of two or at least 16.

    Raises:
        ValueError: the block is not a power of two of at most 128.
    """
    if triton_block_sparse_tma.supports(q, k, v, index):
        q_at, k_at = (each.to(q.device, torch.int32) for each in (q_pos, k_pos))
        return triton_block_sparse_tma.attend_block_sparse(q, k, v, q_at, k_at, index, scale=scale)
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    return _launch(q, (k, v), 0, 0, k.shape[0], strides, k.shape[1], q_pos, k_pos, index, scale)


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
    """Compute `block_sparse.attend_block_sparse_at`.

    q must have the dtype of the caches. Their memory must begin at multiples of 16 bytes.
    """
    _, layers, width = pointers.table.shape
    row, head = shape.kv_heads * shape.head_dim, shape.head_dim
    entry, plane = layer * width + width - 1, layers * width
    strides = (row, head, row, head)
    return _launch(
        q, (pointers.table, pointers.table), entry, plane, 0, strides, shape.kv_heads, q_pos, k_pos, index, scale
    )[0]


def _launch(
    q: Tensor,
    stores: tuple[Tensor, Tensor],
    entry: int,
    plane: int,
    keys: int,
    strides: tuple[int, int, int, int],
    kv_heads: int,
    q_pos: Tensor,
    k_pos: Tensor,
    index: BlockSparseIndex,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels.

    With plane == 0, `stores` is (K, V), with the given number of keys and strides. With plane > 0, both of `stores` are
    a table of addresses: K's address is at number `entry`, V's one plane behind it, and the number of the last row
    another plane behind.
    """
    if index.block & (index.block - 1) or index.block > 128:
        raise ValueError(f"the kernel reads blocks of 1, 2, 4 … 128 keys, not {index.block}")
    count, q_heads, d = q.shape
    heads, tiles = index.counts.shape
    width = max(16, triton.next_power_of_2(d))
    form = launch_shape(
        count, min(index.tile, count + index.offset), math.gcd(q_heads // heads, q_heads // kv_heads), index.block
    )
    out = torch.empty(count, q_heads, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(count, q_heads, dtype=torch.float32, device=q.device)
    q_at, k_at = (each.to(q.device, torch.int32) for each in (q_pos, k_pos))
    columns, column_counts, taken = index.columns, index.column_counts, index.taken
    if columns is None or column_counts is None or taken is None:
        columns, column_counts, taken = index.blocks, index.counts, index.counts  # placeholders, not read
    parts = triton.cdiv(index.tile, form.rows)
    splits = count_splits(tiles * parts * q_heads // form.fold, index.blocks.shape[2] * index.block // form.keys)
    parts_out, parts_lse = (out, lse) if splits == 1 else _partial(splits, q)
    _attend[(q_heads // form.fold, tiles * parts, splits)](
        q, *stores, q_at, k_at, parts_out, parts_lse,
        index.blocks, index.counts, index.clear, columns, column_counts, taken,
        count, keys, entry, plane, scale * LOG2_E.value,
        q.stride(0), q.stride(1), *strides,
        index.blocks.shape[2], columns.shape[1], taken.shape[-1], tiles,
        q_heads // heads, q_heads // kv_heads, index.offset,
        TILE=index.tile, BLOCK=index.block, SINGLES=index.columns is not None,
        ROWS=form.rows, FOLD=form.fold, KEYS=form.keys, D=d, WIDTH=width,
        PRECISE=q.dtype == torch.float32, BY_ADDRESS=plane > 0,
        num_warps=form.warps, num_stages=form.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(count, q_heads)](parts_out, parts_lse, out, lse, count, D=d, WIDTH=width, SPLITS=splits, num_warps=4)
    return out, lse


def _partial(splits: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate partial results: output [splits, T, Hq, d] and log-sum-exp [splits, T, Hq]."""
    out = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    return out, torch.empty(out.shape[:-1], dtype=torch.float32, device=q.device)


@triton.jit(do_not_specialize=CHANGING)
def _attend(
    q_ptr, k_ptr, v_ptr, q_at_ptr, k_at_ptr, out_ptr, lse_ptr,
    blocks_ptr, counts_ptr, clear_ptr, columns_ptr, column_counts_ptr, taken_ptr,
    count, keys, entry, plane, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    most_blocks, most_columns, all_blocks, tiles,
    share, group, offset,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SINGLES: tl.constexpr,
    ROWS: tl.constexpr, FOLD: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISE: tl.constexpr, BY_ADDRESS: tl.constexpr,
):  # fmt: skip
    """Attend with one part of one tile, for FOLD query heads that read the same keys.

    The third program number selects the part of the list that is read. BY_ADDRESS: K and V are found by address.
    """
    PARTS: tl.constexpr = (TILE + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = KEYS // BLOCK
    # Programs of a tile are adjacent, so that its query heads share reads in the L2 cache. Late tiles have the longest
    # lists. They start first, so that none of them runs alone at the end.
    bundle = tl.program_id(0)
    reverse = tl.num_programs(1) - 1 - tl.program_id(1)
    tile, part = reverse // PARTS, reverse % PARTS
    heads = tl.num_programs(0) * FOLD
    list_at = bundle * FOLD // share * tiles + tile
    kv_head = bundle * FOLD // group
    lane = tl.arange(0, ROWS * FOLD)
    head = bundle * FOLD + lane // ROWS
    inside = part * ROWS + lane % ROWS
    row = tile * TILE - offset + inside
    live = (inside < TILE) & (row >= 0) & (row < count)
    d = tl.arange(0, WIDTH)
    q_at = tl.load(q_at_ptr + row, mask=live, other=-1)
    q = tl.load(
        q_ptr + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :],
        mask=live[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    if BY_ADDRESS:
        kind: tl.constexpr = q_ptr.dtype.element_ty
        # The compiler cannot know how addresses from a table are aligned. Without the hint it reads every number alone.
        k_base = tl.multiple_of(tl.load(k_ptr + entry).to(tl.pointer_type(kind)), 16) + kv_head * k_head
        v_base = tl.multiple_of(tl.load(v_ptr + entry + plane).to(tl.pointer_type(kind)), 16) + kv_head * v_head
        keys = (tl.load(k_ptr + entry + 2 * plane) + 1).to(tl.int32)
    else:
        k_base = k_ptr + kv_head * k_head
        v_base = v_ptr + kv_head * v_head
    acc = tl.zeros((ROWS * FOLD, WIDTH), tl.float32)
    top = tl.full((ROWS * FOLD,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * FOLD,), tl.float32)

    lane = tl.arange(0, KEYS)
    listed = tl.load(counts_ptr + list_at)
    clear = tl.load(clear_ptr + list_at) // BLOCKS * BLOCKS
    first = blocks_ptr + list_at.to(tl.int64) * most_blocks
    split, splits = tl.program_id(2), tl.num_programs(2)
    batches = clear // BLOCKS
    for start in range(batches * split // splits * BLOCKS, batches * (split + 1) // splits * BLOCKS, BLOCKS):
        if BLOCKS == 1:
            key = tl.load(first + start) * BLOCK + lane
        else:
            key = tl.load(first + start + lane // BLOCK) * BLOCK + lane % BLOCK
        acc, top, total = _fold(
            acc, top, total, q, q_at, k_base, v_base, k_at_ptr, key, lane >= 0, k_row, v_row, scale, d, D, PRECISE, True
        )  # fmt: skip
    latest = tl.max(q_at, 0)
    batches = tl.cdiv(listed - clear, BLOCKS)
    for batch in range(batches * split // splits, batches * (split + 1) // splits):
        start = clear + batch * BLOCKS
        at = start + lane // BLOCK
        key = tl.load(first + at, mask=at < listed, other=0) * BLOCK + lane % BLOCK
        there = (at < listed) & (key < keys)
        if tl.min(tl.load(k_at_ptr + key, mask=there, other=NEVER), 0) <= latest:
            acc, top, total = _fold(
                acc, top, total, q, q_at, k_base, v_base, k_at_ptr, key, there,
                k_row, v_row, scale, d, D, PRECISE, False,
            )  # fmt: skip
    if SINGLES:
        singles = tl.load(column_counts_ptr + list_at)
        first = columns_ptr + (list_at // tiles).to(tl.int64) * most_columns
        known = taken_ptr + list_at.to(tl.int64) * all_blocks
        batches = tl.cdiv(singles, KEYS)
        for batch in range(batches * split // splits, batches * (split + 1) // splits):
            at = batch * KEYS + lane
            key = tl.load(first + at, mask=at < singles, other=0)
            listed_twice = tl.load(known + key // BLOCK, mask=at < singles, other=1)
            acc, top, total = _fold(
                acc, top, total, q, q_at, k_base, v_base, k_at_ptr, key, (at < singles) & (listed_twice == 0),
                k_row, v_row, scale, d, D, PRECISE, False,
            )  # fmt: skip

    seen_any = total > 0
    safe = tl.where(seen_any, total, 1.0)
    to = (split * count + row).to(tl.int64) * heads + head
    out = out_ptr + to[:, None] * D + d[None, :]
    tl.store(out, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    lse = tl.where(seen_any, (top + tl.log2(safe)) / LOG2_E, float("-inf"))
    tl.store(lse_ptr + to, lse, mask=live)


@triton.jit(do_not_specialize=["count"])
def _merge(parts_ptr, lses_ptr, out_ptr, lse_ptr, count, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Merge the partial results of one query head of one row, weighted by their shares of the softmax."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = (split * count + row).to(tl.int64) * heads + head
    lse = tl.load(lses_ptr + at)
    top = tl.max(lse, 0)
    seen_any = top > float("-inf")
    weight = tl.exp(lse - tl.where(seen_any, top, 0.0))
    total = tl.sum(weight, 0)
    safe = tl.where(seen_any, total, 1.0)
    parts = tl.load(parts_ptr + at[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / safe
    to = row.to(tl.int64) * heads + head
    tl.store(out_ptr + to * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + to, tl.where(seen_any, top + tl.log(safe), float("-inf")))


@triton.jit
def _fold(
    acc, top, total, q, q_at, k_base, v_base, k_at_ptr, key, there,
    k_row, v_row, scale, d, D: tl.constexpr, PRECISE: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Add the keys [KEYS] that are `there` to the running softmax. CLEAR: all are, and every query sees them."""
    kind: tl.constexpr = "ieee" if PRECISE else "tf32"
    wide_key = key.to(tl.int64)
    whole: tl.constexpr = CLEAR and d.shape[0] == D
    mask = there[:, None] & (d < D)[None, :]
    if whole:
        k = tl.load(k_base + wide_key[:, None] * k_row + d[None, :])
    else:
        k = tl.load(k_base + wide_key[:, None] * k_row + d[None, :], mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=kind) * scale
    if CLEAR:
        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
    else:
        k_at = tl.load(k_at_ptr + key, mask=there, other=NEVER)
        scores = tl.where(k_at[None, :] <= q_at[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    if whole:
        v = tl.load(v_base + wide_key[:, None] * v_row + d[None, :])
    else:
        v = tl.load(v_base + wide_key[:, None] * v_row + d[None, :], mask=mask, other=0.0)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=kind)
    return acc, higher, total * fade + tl.sum(weights, 1)
