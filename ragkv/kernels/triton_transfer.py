"""The Triton kernel of `transfer.py`.

A few programs go through all blocks, one piece at a time, and leave the rest of the GPU to the model, which computes at
the same time. Page-locked memory is read over the bus, which a few programs saturate with some tens of kilobytes in
flight each. Blocks in the GPU's own memory need many programs, and are read so fast that overlap does not matter.
Numbers are float32 internally and rounded where `model.decoder.rotate` rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ragkv.kernels.transfer import TransferFormat, TransferTable

FAR, NEAR = 48, 528
"""Programs for blocks in host memory (a third of a large GPU's multiprocessors), and in the GPU's own memory."""
PIECE = 4096
"""Numbers that a program reads at a time from each half (of the head dimensions) of K and of V."""
BODIES = {"exact": 0, "int8": 1, "fp8": 2}


def transfer_blocks(
    entries: TransferTable, first: int, count: int, cos: Tensor, sin: Tensor, form: TransferFormat
) -> None:
    """Compute `transfer.transfer_blocks`.

    cos and sin must be contiguous. Where the rows of blocks and of the cache are multiples of 16 bytes long, blocks and
    rows must begin at multiples of 16 bytes.
    """
    if not count:
        return
    heads, half = form.kv_heads, form.head_dim // 2
    wide, heads_wide = triton.next_power_of_2(half), triton.next_power_of_2(heads)
    tokens = max(1, min(triton.next_power_of_2(form.block), PIECE // (wide * heads_wide)))
    pieces = triton.cdiv(form.block, tokens)
    aligned = form.row_bytes % 16 == 0 and heads * form.head_dim * form.dtype.itemsize % 16 == 0
    _transfer[(min(NEAR if form.near else FAR, count * pieces),)](
        entries.table, cos, sin, first, count * pieces, entries.table.shape[1], form.limit,
        BODY=BODIES[form.body], ALIGN=16 if aligned else 1, PIECES=pieces, TOKENS=tokens,
        HEADS=heads, HEADS_WIDE=heads_wide, D=form.head_dim, WIDE=wide, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "items", "entries"])
def _transfer(
    table_ptr, cos_ptr, sin_ptr, first, items, entries, limit,
    BODY: tl.constexpr, ALIGN: tl.constexpr, PIECES: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, HEADS_WIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Transfer every n-th piece, with n programs. low, high: the halves of a head that RoPE rotates."""
    HALF: tl.constexpr = D // 2
    ROW: tl.constexpr = HEADS * D
    kind: tl.constexpr = cos_ptr.dtype.element_ty
    token = tl.arange(0, TOKENS)[:, None, None]
    head = tl.arange(0, HEADS_WIDE)[None, :, None]
    lane = tl.arange(0, WIDE)[None, None, :]
    inside = (head < HEADS) & (lane < HALF)
    at = token * ROW + head * D + lane
    angle = token * D + lane
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        entry, start = first + item // PIECES, item % PIECES * TOKENS
        block = tl.load(table_ptr + entry)
        # 64-bit, as everything in the table.
        tokens = tl.load(table_ptr + entries + entry)
        k_to = tl.multiple_of(tl.load(table_ptr + 2 * entries + entry).to(tl.pointer_type(kind)), ALIGN)
        v_to = tl.multiple_of(tl.load(table_ptr + 3 * entries + entry).to(tl.pointer_type(kind)), ALIGN)
        position = tl.load(table_ptr + 4 * entries + entry) + start
        here = start + token < tokens
        live = here & inside
        if BODY == 0:
            k_from = tl.multiple_of(block.to(tl.pointer_type(kind)), ALIGN) + start * ROW
            v_from = k_from + tokens * ROW
            k_low = tl.load(k_from + at, mask=live, other=0.0)
            k_high = tl.load(k_from + at + HALF, mask=live, other=0.0)
            v_low = tl.load(v_from + at, mask=live, other=0.0)
            v_high = tl.load(v_from + at + HALF, mask=live, other=0.0)
        else:
            k_from = tl.multiple_of(block.to(tl.pointer_type(tl.int8)), ALIGN) + start * ROW
            v_from = k_from + tokens * ROW
            k_low = tl.load(k_from + at, mask=live, other=0)
            k_high = tl.load(k_from + at + HALF, mask=live, other=0)
            v_low = tl.load(v_from + at, mask=live, other=0)
            v_high = tl.load(v_from + at + HALF, mask=live, other=0)
            # float16 scales follow the codes: of K for each head and dimension, of V for each token and head.
            k_scales = tl.multiple_of((block + 2 * tokens * ROW).to(tl.pointer_type(tl.float16)), ALIGN)
            v_scales = (block + (2 * tokens + 2) * ROW).to(tl.pointer_type(tl.float16)) + start * HEADS
            scale_low = tl.load(k_scales + head * D + lane, mask=inside, other=0.0).to(tl.float32)
            scale_high = tl.load(k_scales + head * D + lane + HALF, mask=inside, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scales + token * HEADS + head, mask=here & (head < HEADS), other=0.0).to(tl.float32)
            k_low = decode_codes(k_low, scale_low, limit, kind, BODY)
            k_high = decode_codes(k_high, scale_high, limit, kind, BODY)
            v_low = decode_codes(v_low, v_scale, limit, kind, BODY)
            v_high = decode_codes(v_high, v_scale, limit, kind, BODY)
        angles = cos_ptr + position * D
        cos_low = tl.load(angles + angle, mask=here & (lane < HALF), other=0.0).to(tl.float32)
        cos_high = tl.load(angles + angle + HALF, mask=here & (lane < HALF), other=0.0).to(tl.float32)
        angles = sin_ptr + position * D
        sin_low = tl.load(angles + angle, mask=here & (lane < HALF), other=0.0).to(tl.float32)
        sin_high = tl.load(angles + angle + HALF, mask=here & (lane < HALF), other=0.0).to(tl.float32)
        k_low, k_high = k_low.to(tl.float32), k_high.to(tl.float32)
        low = (k_low * cos_low).to(kind).to(tl.float32) - (k_high * sin_low).to(kind).to(tl.float32)
        high = (k_high * cos_high).to(kind).to(tl.float32) + (k_low * sin_high).to(kind).to(tl.float32)
        to = k_to + start * ROW + at
        tl.store(to, low.to(kind), mask=live)
        tl.store(to + HALF, high.to(kind), mask=live)
        to = v_to + start * ROW + at
        tl.store(to, v_low, mask=live)
        tl.store(to + HALF, v_high, mask=live)


@triton.jit
def decode_codes(codes, scale, limit, kind: tl.constexpr, BODY: tl.constexpr):
    """Decode bytes into numbers of the cache dtype."""
    if BODY == 1:
        wide = codes.to(tl.float32)
    else:
        # e4m3 shifted left by 7 bits is a float16 that is 2^8 too small (store/format/quantise.py).
        bits = (codes.to(tl.int16) << 7) & ~0x4000
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.minimum(tl.maximum(wide * scale, -limit), limit).to(kind)
