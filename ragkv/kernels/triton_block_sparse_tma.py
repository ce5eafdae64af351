"""Attention over lists for many rows, on GPUs that copy blocks by themselves (compute capability 9: TMA).

As the kernel of `triton_block_sparse.py`, for lists of whole blocks of `KEYS` keys: a block is one rectangle of the cache, so
one thread asks for it and no address is worked out; nothing else is loaded in the loop while all of a tile see a block.
Two programs share a multiprocessor (hence the registers that each may have): one multiplies while the other is at its
softmax. Programs of the same tile follow one another, so that query heads find what they read in the L2, and late
tiles, whose lists are the longest, come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragkv.kernels.block_sparse import KEYS, BlockSparseIndex

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2147483647)
ROWS = 128
"""Rows of all of a program's query heads together; 64 where a tile has fewer."""
PROGRAMS = 256
"""Where there are no more, a list is better shared among several, and the host had better make no descriptors."""


@dataclass(frozen=True)
class TileShape:
    """What a program does: `rows` queries of each of `fold` query heads. regs: what a thread may have."""

    rows: int
    fold: int
    warps: int
    regs: int


def tile_shape(q: Tensor, k: Tensor, index: BlockSparseIndex) -> TileShape | None:
    """None: lists, or sizes, that this kernel does not read."""
    heads, tiles = index.counts.shape
    alike = math.gcd(q.shape[1] // heads, q.shape[1] // k.shape[1])
    if index.block != KEYS or index.columns is not None or q.dtype.itemsize != 2 or q.shape[2] not in (64, 128):
        return None
    fold = min(4, alike & -alike)
    rows = min(ROWS // fold, 1 << (index.tile.bit_length() - 1))
    # Fewer rows than 64 would not be multiplied by a group of warps.
    form = TileShape(rows, fold, 8, 128) if rows * fold == ROWS else TileShape(rows, fold, 4, 168)
    programs = tiles * triton.cdiv(index.tile, rows) * q.shape[1] // fold
    return form if rows * fold >= 64 and programs > PROGRAMS else None


def supports(q: Tensor, k: Tensor, v: Tensor, index: BlockSparseIndex) -> bool:
    """Whether `attend_lists` is right here, and quicker than the kernel that gathers."""
    plain = (k.shape[1] * k.shape[2], k.shape[2], 1)
    rows = all(x.stride() == plain and x.data_ptr() % 16 == 0 and x.dtype == q.dtype for x in (k, v))
    # What was measured was Hopper; later GPUs multiply in other ways.
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and rows
        and tile_shape(q, k, index) is not None
    )


def attend_block_sparse(
    q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, index: BlockSparseIndex, *, scale: float
) -> tuple[Tensor, Tensor]:
    """As `lists.attend_lists`, of what `takes` takes; positions int32. Raises ValueError for what has no form."""
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
    """Queries of one part of one tile, of FOLD query heads that read the same keys."""
    PARTS: tl.constexpr = (TILE + ROWS - 1) // ROWS
    bundle = tl.program_id(0)
    place = tl.num_programs(1) - 1 - tl.program_id(1)
    tile, part = place // PARTS, place % PARTS
    heads = tl.num_programs(0) * FOLD
    of = bundle * FOLD // share * tiles + tile
    asked = bundle * FOLD // group * D
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
    clear = tl.load(clear_ptr + of)
    first = blocks_ptr + of.to(tl.int64) * most
    for lot in tl.range(0, tl.load(counts_ptr + of), num_stages=2):
        start = tl.load(first + lot) * BLOCK
        k = k_rows.load([start, asked])
        scores = tl.dot(q, tl.trans(k))
        if lot >= clear:
            k_at = tl.load(k_at_ptr + start + lane, mask=lane < keys - start, other=NEVER)
            scores = tl.where(k_at[None, :] <= q_at[:, None], scores, float("-inf"))
        # The scale joins the subtraction in one instruction.
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        top = higher
        acc = acc * fade[:, None]
        v = v_rows.load([start, asked])
        acc = tl.dot(weights.to(v.dtype), v, acc)
        if WAIT:
            acc = _done(acc)

    some = total > 0
    safe = tl.where(some, total, 1.0)
    to = row.to(tl.int64) * heads + head
    out = (acc * (1.0 / safe)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] * D + d[None, :], out, mask=live[:, None])
    tl.store(lse_ptr + to, tl.where(some, (top + tl.log2(safe)) / LOG2_E, float("-inf")), mask=live)


@triton.jit
def _done(x):
    """x, once the product that makes it is done: a move that the assembler drops again.

    Triton lets a product run on into the next turn of the loop. Within 128 registers there is no room for that: the
    weights, which it still reads, would have to stay beside the next scores, so the assembler makes all products of
    the loop run one after the other (and says so). Waiting here costs nothing, since the other program of the
    multiprocessor works on, and was worth 2% to 4%.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
