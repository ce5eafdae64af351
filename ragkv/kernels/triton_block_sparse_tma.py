"""Block-sparse attention for many rows on GPUs with a copy engine for blocks (TMA, compute capability 9).

The kernel does what that of `triton_block_sparse.py` does, for indices of whole blocks of `KEYS` keys. A block is one
rectangle of the cache, so one thread requests it and no addresses are computed. The loop loads nothing else while all
rows of a tile see a block. Two programs share a multiprocessor, which limits the registers of each: one multiplies
while the other computes its softmax. Programs of a tile are adjacent, so that query heads share reads in the L2 cache.
Late tiles have the longest lists and start first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragkv.kernels.block_index import KEYS, BlockSparseIndex

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2147483647)
ROWS = 128
"""Rows of a program over all its query heads; 64 where a tile has fewer."""
PROGRAMS = 256
"""Up to this number of programs the other kernel is better: it shares lists and needs no descriptors from the host."""


@dataclass(frozen=True)
class TileShape:
    """Work of one program.

    Attributes:
        rows: queries of each query head.
        fold: query heads that read the same keys.
        warps: warps of the program.
        regs: registers of a thread, at most.
    """

    rows: int
    fold: int
    warps: int
    regs: int


def tile_shape(q: Tensor, k: Tensor, index: BlockSparseIndex) -> TileShape | None:
    """Return the work of a program, or None for an index or sizes that this kernel does not support."""
    heads, tiles = index.counts.shape
    group_size = math.gcd(q.shape[1] // heads, q.shape[1] // k.shape[1])
    if index.block != KEYS or index.columns is not None or q.dtype.itemsize != 2 or q.shape[2] not in (64, 128):
        return None
    fold = min(4, group_size & -group_size)
    rows = min(ROWS // fold, 1 << (index.tile.bit_length() - 1))
    # A warp group cannot multiply fewer than 64 rows.
    form = TileShape(rows, fold, 8, 128) if rows * fold == ROWS else TileShape(rows, fold, 4, 168)
    programs = tiles * triton.cdiv(index.tile, rows) * q.shape[1] // fold
    return form if rows * fold >= 64 and programs > PROGRAMS else None


def supports(q: Tensor, k: Tensor, v: Tensor, index: BlockSparseIndex) -> bool:
    """Return whether `attend_block_sparse` of this module works here and is faster than the kernel that gathers."""
    plain = (k.shape[1] * k.shape[2], k.shape[2], 1)
    rows = all(x.stride() == plain and x.data_ptr() % 16 == 0 and x.dtype == q.dtype for x in (k, v))
    # Measured on Hopper only. Later GPUs have other matrix instructions.
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and rows
        and tile_shape(q, k, index) is not None
    )


def attend_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `block_sparse.attend_block_sparse` for inputs that this kernel supports. Positions are int32.

    Raises:
        ValueError: the kernel does not support these inputs.
    """
    form = tile_shape(q, k, index)
    if form is None:
        raise ValueError(f"many rows over blocks of {KEYS} keys are read here, without columns and in half precision")
    count, q_heads, d = q.shape
    keys, kv_heads, _ = k.shape
    heads, tiles = index.counts.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(count, q_heads, dtype=torch.float32, device=q.device)
    k_rows, v_rows = (
        TensorDescriptor(x, [keys, kv_heads * d], [kv_heads * d, 1], [KEYS, d]) for x in (k, v)
    )  # fmt: skip
    _attend[(q_heads // form.fold, tiles * triton.cdiv(index.tile, form.rows))](
        q, k_rows, v_rows, q_at, k_at, out, lse, index.blocks, index.counts, index.clear,
        count, keys, scale * LOG2_E.value, q.stride(0), q.stride(1),
        index.blocks.shape[2], tiles, index.offset, q_heads // heads, q_heads // kv_heads,
        TILE=index.tile, BLOCK=KEYS, ROWS=form.rows, FOLD=form.fold, D=d, WAIT=q.is_cuda,
        num_warps=form.warps, num_stages=2, maxnreg=form.regs,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["count", "keys", "most", "tiles", "offset"])
def _attend(
    q_ptr, k_rows, v_rows, q_at_ptr, k_at_ptr, out_ptr, lse_ptr, blocks_ptr, counts_ptr, clear_ptr,
    count, keys, scale, q_row, q_head, most, tiles, offset, share, group,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, D: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Attend with one part of one tile, for FOLD query heads that read the same keys."""
    PARTS: tl.constexpr = (TILE + ROWS - 1) // ROWS
    bundle = tl.program_id(0)
    reverse = tl.num_programs(1) - 1 - tl.program_id(1)
    tile, part = reverse // PARTS, reverse % PARTS
    heads = tl.num_programs(0) * FOLD
    list_at = bundle * FOLD // share * tiles + tile
    kv_column = bundle * FOLD // group * D
    each = tl.arange(0, ROWS * FOLD)
    head = bundle * FOLD + each // ROWS
    inside = part * ROWS + each % ROWS
    row = tile * TILE - offset + inside
    live = (inside < TILE) & (row >= 0) & (row < count)
    d = tl.arange(0, D)
    q = tl.load(
        q_ptr + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0
    )
    q_at = tl.load(q_at_ptr + row, mask=live, other=-1)
    acc = tl.zeros((ROWS * FOLD, D), tl.float32)
    top = tl.full((ROWS * FOLD,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * FOLD,), tl.float32)

    lane = tl.arange(0, BLOCK)
    clear = tl.load(clear_ptr + list_at)
    first = blocks_ptr + list_at.to(tl.int64) * most
    for number in tl.range(0, tl.load(counts_ptr + list_at), num_stages=2):
        start = tl.load(first + number) * BLOCK
        k = k_rows.load([start, kv_column])
        scores = tl.dot(q, tl.trans(k))
        if number >= clear:
            k_at = tl.load(k_at_ptr + start + lane, mask=lane < keys - start, other=NEVER)
            scores = tl.where(k_at[None, :] <= q_at[:, None], scores, float("-inf"))
        # Scaling here lets the compiler fuse the product with the subtraction.
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        top = higher
        acc = acc * fade[:, None]
        v = v_rows.load([start, kv_column])
        acc = tl.dot(weights.to(v.dtype), v, acc)
        if WAIT:
            acc = _wait(acc)

    seen_any = total > 0
    safe = tl.where(seen_any, total, 1.0)
    to = row.to(tl.int64) * heads + head
    out = (acc * (1.0 / safe)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] * D + d[None, :], out, mask=live[:, None])
    tl.store(lse_ptr + to, tl.where(seen_any, (top + tl.log2(safe)) / LOG2_E, float("-inf")), mask=live)


@triton.jit
def _wait(x):
    """Return x after waiting for the product that computes it. The assembler removes the move itself.

    Triton lets a product run on into the next iteration of the loop. 128 registers are too few for that: the product
    still reads the weights, which would have to be kept beside the next scores, so the assembler serialises all
    products of the loop (and reports it). Waiting here costs nothing, since the other program of the multiprocessor
    continues. It made the kernel 2% to 4% faster.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
