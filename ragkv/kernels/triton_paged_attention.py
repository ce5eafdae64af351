"""The Triton kernel of `paged_attention.py`.

Attention of each row to its own cache is that of `triton_decode_step.py`. A fixed number of programs goes through the
units, each with one kv head at a time: the number of units is read from the device, so a recorded graph serves any
requests. A last kernel merges all parts of a row. Numbers are float32 internally and rounded where the models' own
modules round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragkv.kernels.decode_step import CachePointers
from ragkv.kernels.early_launch import early
from ragkv.kernels.paged_attention import LANE_FIELDS, UNIT_FIELDS, PagedBlocks, RawQueries, segment_blocks
from ragkv.kernels.triton_decode_step import LOG2_E, attend_parts
from ragkv.kernels.triton_transfer import BODIES, decode_codes

KEYS = 64
"""Keys that a program reads at a time."""
PROGRAMS = 264
"""Programs that go through the units: two for each multiprocessor of a large GPU."""
PARTS = 16
"""Parts that are merged at a time."""


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
    """Compute `paged_attention.attend_paged`.

    All tensors must be contiguous. q and `raw.qkv` must have the dtype of caches and blocks, whose rows must begin
    at multiples of 16 bytes. `splits` must be a power of two.
    """
    (count, q_heads, d), shape, norms, lanes = q.shape, paged.shape, raw.norms, paged.lanes
    block, rows = paged.form.block, max(16, triton.next_power_of_2(lanes * q_heads // shape.kv_heads))
    wide, half = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(d // 2))
    own, own_lses = attend_parts(q, pointers, layer, shape, scale=scale, splits=splits)
    weight, eps = (paged.cos, 0.0) if norms is None else (norms.weight, norms.eps)  # a placeholder, not read
    _attend_units[(PROGRAMS,)](
        raw.qkv, raw.positions, paged.cos, paged.sin, weight, paged.units, paged.bounds, paged.parts, paged.lses,
        layer, shape.layers, eps, scale * LOG2_E, paged.form.limit,
        NORMED=norms is not None, Q_HEADS=q_heads, KV_HEADS=shape.kv_heads, D=d, WIDE=wide, HALF_WIDE=half,
        LANES=lanes, UNIT=UNIT_FIELDS + LANE_FIELDS * lanes, FIELDS=UNIT_FIELDS, ROWS=rows, BLOCK=block, KEYS=KEYS,
        SEGMENT=segment_blocks(block), BODY=BODIES[paged.form.body], PRECISE=q.dtype == torch.float32,
        num_warps=4 if wide <= 128 else 8, num_stages=2, **early(q),
    )  # fmt: skip
    out = torch.empty_like(q)
    _merge_all[(count, q_heads)](
        own, own_lses, paged.parts, paged.lses, paged.bounds, out,
        Q_HEADS=q_heads, D=d, WIDE=wide, SPLITS=splits, PARTS=PARTS, num_warps=4, **early(q),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["layer", "layers"])
def _attend_units(
    qkv_ptr, positions_ptr, cos_ptr, sin_ptr, weight_ptr, units_ptr, bounds_ptr, parts_ptr, lses_ptr,
    layer, layers, eps, scale, limit,
    NORMED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    HALF_WIDE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, SEGMENT: tl.constexpr, BODY: tl.constexpr, PRECISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Attend with all rows of every n-th unit and kv head, with n programs. A part without keys has a lse of -inf.

    low, high: the halves of a head that RoPE rotates.
    """
    if EARLY:
        gdc_launch_dependents()
    how: tl.constexpr = "ieee" if PRECISE else "tf32"
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    STRIDE: tl.constexpr = KV_HEADS * D
    r, key, d, h = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDE), tl.arange(0, HALF_WIDE)
    lane = r // GROUP
    for item in range(tl.program_id(0), tl.load(bounds_ptr).to(tl.int32) * KV_HEADS, tl.num_programs(0)):
        head = item % KV_HEADS
        unit = units_ptr + item // KV_HEADS * UNIT
        tile = tl.load(unit).to(tl.pointer_type(tl.int64))
        entries, tokens = tl.load(unit + 1), tl.load(unit + 2)
        first = (tl.load(tile + layer) + tl.load(unit + 3) * SEGMENT).to(tl.int32)
        last = tl.minimum(first + SEGMENT, tl.load(tile + layer + 1).to(tl.int32))
        listed = tile + layers + 1
        entry = first + key // BLOCK
        address = tl.load(listed + entry, mask=entry < last, other=0)
        mark = tl.load(listed + entries + entry, mask=entry < last, other=0)

        lanes = unit + FIELDS + lane
        row = tl.load(lanes, mask=lane < LANES, other=-1)
        live = row >= 0
        bit = tl.load(lanes + LANES, mask=live, other=0)
        start = tl.load(lanes + 2 * LANES, mask=live, other=0)
        part = tl.load(lanes + 3 * LANES, mask=live, other=0)
        q_head = head * GROUP + r % GROUP
        here = live[:, None] & (h < HALF)[None, :]
        angle = (tl.load(positions_ptr + row, mask=live, other=0) - start)[:, None] * D + h[None, :]
        cos = tl.load(cos_ptr + angle, mask=here, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=here, other=0.0).to(tl.float32)
        # Tables and positions are there before the step begins. Only queries are computed in it.
        if EARLY:
            gdc_wait()
        from_q = ((row * (Q_HEADS + 2 * KV_HEADS) + q_head) * D)[:, None] + h[None, :]
        low = tl.load(qkv_ptr + from_q, mask=here, other=0.0).to(tl.float32)
        high = tl.load(qkv_ptr + from_q + HALF, mask=here, other=0.0).to(tl.float32)
        if NORMED:
            shrink = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)
            low = (low * shrink[:, None]).to(kind).to(tl.float32)
            high = (high * shrink[:, None]).to(kind).to(tl.float32)
            low = (low * tl.load(weight_ptr + h, mask=h < HALF, other=0.0)[None, :]).to(kind).to(tl.float32)
            high = (high * tl.load(weight_ptr + HALF + h, mask=h < HALF, other=0.0)[None, :]).to(kind).to(tl.float32)
        q_low, q_high = _rotate(low, high, cos, sin, kind)

        acc = tl.zeros((ROWS, WIDE), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for begin in range(first * BLOCK, last * BLOCK, KEYS):
            inside, number = (begin + key) % BLOCK, mark >> 32
            count = tl.minimum(tokens - number * BLOCK, BLOCK)
            there = (entry < last) & (inside < count)
            kept = ((mark[None, :] >> bit[:, None]) & 1) != 0
            k_here, v_here = there[:, None] & (h < HALF)[None, :], there[:, None] & (d < D)[None, :]
            # As in `triton_decode_step._attend`: the compiler cannot know how addresses are aligned.
            if BODY == 0:
                k_from = tl.multiple_of(address.to(tl.pointer_type(kind)), 16) + (inside * STRIDE + head * D)
                v_from = k_from + count * STRIDE
                raw_low = tl.load(k_from[:, None] + h[None, :], mask=k_here, other=0.0)
                raw_high = tl.load(k_from[:, None] + HALF + h[None, :], mask=k_here, other=0.0)
                v = tl.load(v_from[:, None] + d[None, :], mask=v_here, other=0.0)
            else:
                k_from = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16) + (inside * STRIDE + head * D)
                v_from = k_from + count * STRIDE
                raw_low = tl.load(k_from[:, None] + h[None, :], mask=k_here, other=0)
                raw_high = tl.load(k_from[:, None] + HALF + h[None, :], mask=k_here, other=0)
                v = tl.load(v_from[:, None] + d[None, :], mask=v_here, other=0)
                # Scales as `triton_transfer._transfer` finds them.
                scales = address + 2 * count * STRIDE
                k_scales = tl.multiple_of(scales.to(tl.pointer_type(tl.float16)), 16) + head * D
                v_scales = (scales + 2 * STRIDE).to(tl.pointer_type(tl.float16)) + inside * KV_HEADS + head
                scale_low = tl.load(k_scales[:, None] + h[None, :], mask=k_here, other=0.0).to(tl.float32)
                scale_high = tl.load(k_scales[:, None] + HALF + h[None, :], mask=k_here, other=0.0).to(tl.float32)
                v_scale = tl.load(v_scales, mask=there, other=0.0).to(tl.float32)
                raw_low = decode_codes(raw_low, scale_low, limit, kind, BODY)
                raw_high = decode_codes(raw_high, scale_high, limit, kind, BODY)
                v = decode_codes(v, v_scale[:, None], limit, kind, BODY)
            # The next addresses are read while the rows that are on their way are waited for.
            entry = (begin + KEYS + key) // BLOCK
            address = tl.load(listed + entry, mask=entry < last, other=0)
            mark = tl.load(listed + entries + entry, mask=entry < last, other=0)
            at = (number * BLOCK + inside)[:, None] * D + h[None, :]
            k_cos = tl.load(cos_ptr + at, mask=k_here, other=0.0).to(tl.float32)
            k_sin = tl.load(sin_ptr + at, mask=k_here, other=0.0).to(tl.float32)
            k_low, k_high = _rotate(raw_low.to(tl.float32), raw_high.to(tl.float32), k_cos, k_sin, kind)
            scores = tl.dot(q_low, tl.trans(k_low), input_precision=how)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=how) * scale
            scores = tl.where(kept & there[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows that keep nothing so far
            weights = tl.exp2(scores - safe[:, None])
            fade = tl.exp2(top - safe)
            acc = acc * fade[:, None] + tl.dot(weights.to(kind), v, input_precision=how)
            total = total * fade + tl.sum(weights, 1)
            top = higher

        some = total > 0
        total = tl.where(some, total, 1.0)
        to = part * Q_HEADS + q_head
        tl.store(parts_ptr + to[:, None] * D + d[None, :], acc / total[:, None], mask=live[:, None] & (d < D)[None, :])
        tl.store(lses_ptr + to, tl.where(some, top + tl.log2(total), float("-inf")), mask=live)
    if EARLY:
        gdc_wait()  # programs without a unit, too: this kernel must not end before those in front of it


@triton.jit
def _rotate(low, high, cos, sin, kind: tl.constexpr):
    """Apply RoPE to the halves of rows. Both halves of a row of cos, or sin, are equal."""
    turned_low = (low * cos).to(kind).to(tl.float32) - (high * sin).to(kind).to(tl.float32)
    turned_high = (high * cos).to(kind).to(tl.float32) + (low * sin).to(kind).to(tl.float32)
    return turned_low.to(kind), turned_high.to(kind)


@triton.jit
def _merge_all(
    own_ptr, own_lses_ptr, parts_ptr, lses_ptr, bounds_ptr, out_ptr,
    Q_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head of one row, weighted by their shares of the softmax.

    The row's own cache has at least the new row, so the first parts are not all empty.
    """
    if EARLY:
        gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    split, d, some = tl.arange(0, SPLITS), tl.arange(0, WIDE), tl.arange(0, PARTS)
    first, last = tl.load(bounds_ptr + 1 + row).to(tl.int32), tl.load(bounds_ptr + 2 + row).to(tl.int32)
    if EARLY:
        gdc_wait()
    at = (row * SPLITS + split).to(tl.int64) * Q_HEADS + head
    lse = tl.load(own_lses_ptr + at)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - top)
    found = tl.load(own_ptr + at[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    acc, total = tl.sum(found * weight[:, None], 0), tl.sum(weight, 0)
    for begin in range(first, last, PARTS):
        there = (begin + some).to(tl.int64) * Q_HEADS + head
        more = tl.load(lses_ptr + there, mask=begin + some < last, other=float("-inf"))
        higher = tl.maximum(top, tl.max(more, 0))
        share, fade = tl.exp2(more - higher), tl.exp2(top - higher)
        mask = (more > float("-inf"))[:, None] & (d < D)[None, :]
        part = tl.load(parts_ptr + there[:, None] * D + d[None, :], mask=mask, other=0.0)
        acc = acc * fade + tl.sum(part * share[:, None], 0)
        total = total * fade + tl.sum(share, 0)
        top = higher
    to = (row * Q_HEADS + head).to(tl.int64) * D + d
    tl.store(out_ptr + to, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)
