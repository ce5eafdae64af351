"""The Triton kernel of `pool.py`: one program reads the ranked blocks of one kv head of one request.

A program keeps the state of its partition in registers, except for the map from blocks to slots, which it reads and
updates in memory. Threads of a program see each other's writes only after a barrier: there is one between reading the
map and updating it, and one before it is read again. The loop is a `while`, which Triton does not pipeline; a pipelined
loop would read the map before it is updated. Slots that were read in this step are not replaced, so a slot is never
read after it was written in the same step.

A block without a slot is read from pinned host memory by its address and written to its slot from the registers, so it
crosses the bus once. Numbers are float32 internally, logarithms of base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragkv.kernels.decode_step import CachePointers
from ragkv.kernels.pool import PoolRead, SlotPool, StopRule
from ragkv.kernels.triton_decode_step import LOG2_E, _fold
from ragkv.types import Shape

NEAR = 64
"""Near rows that are read at a time."""


def attend_progressively(
    q: Tensor,
    order: Tensor,
    pool: SlotPool,
    near: CachePointers,
    layer: int,
    shape: Shape,
    rule: StopRule,
    clock: Tensor,
    *,
    scale: float,
) -> PoolRead:
    """Compute `pool.attend_progressively`.

    q and order must be contiguous, and q must have the dtype of the caches. All memory must begin at multiples of 16
    bytes.

    Raises:
        ValueError: the rows of a block are not a power of two.
    """
    count, q_heads, d = q.shape
    slots, _, size = pool.slots.shape[3:6]
    if size & (size - 1):
        raise ValueError("a block must have a power of two of rows")
    padded = max(triton.next_power_of_2(rule.micro), 16 // size)
    out = torch.empty_like(q)
    read = torch.empty(count, shape.kv_heads, dtype=torch.int32, device=q.device)
    missed = torch.empty_like(read)
    _attend_progressively[(count, shape.kv_heads)](
        q, order, near.table, pool.host, pool.ranked, clock, pool.slots, pool.slot_of, pool.block_of, pool.last_used,
        out, read, missed, layer, near.table.shape[1], count, order.shape[2], scale * LOG2_E, rule.threshold,
        rule.least, rule.part,
        Q_HEADS=q_heads, KV_HEADS=shape.kv_heads, D=d, WIDE=max(16, triton.next_power_of_2(d)), SIZE=size,
        MICRO=rule.micro, PADDED=padded, ROWS=max(16, triton.next_power_of_2(q_heads // shape.kv_heads)),
        SLOTS=slots, ROOM=triton.next_power_of_2(max(slots, 1)), STEP=NEAR, MEAN=rule.mean,
        PRECISE=q.dtype == torch.float32, num_warps=8, num_stages=2,
    )  # fmt: skip
    return PoolRead(out, read, missed)


@triton.jit(do_not_specialize=["layer", "layers", "width", "most", "least"])
def _attend_progressively(
    q_ptr, order_ptr, table_ptr, host_ptr, ranked_ptr, clock_ptr, slots_ptr, slot_of_ptr, block_of_ptr, last_used_ptr,
    out_ptr, read_ptr, missed_ptr, layer, layers, width, most, scale, threshold, least, part,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    MICRO: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, ROOM: tl.constexpr,
    STEP: tl.constexpr, MEAN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Attend with all query heads of one kv head of one request: near rows, then ranked blocks until the rule stops."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    BLOCK: tl.constexpr = 2 * SIZE * D
    KEYS: tl.constexpr = PADDED * SIZE
    how: tl.constexpr = "ieee" if PRECISE else "tf32"
    request, head = tl.program_id(0), tl.program_id(1)
    kind: tl.constexpr = q_ptr.dtype.element_ty
    BYTES: tl.constexpr = kind.primitive_bitwidth // 8
    layer_of = layer * width + request
    partition = (layer_of * KV_HEADS + head).to(tl.int64)
    ranked = tl.load(ranked_ptr + layer_of)
    now = tl.load(clock_ptr).to(tl.int32)
    order_ptr += (request * KV_HEADS + head).to(tl.int64) * most
    slot_of_ptr += partition * most
    slots_ptr += partition * SLOTS * BLOCK
    host = tl.load(host_ptr + 2 * layer_of) + tl.load(host_ptr + 2 * layer_of + 1) * head

    row, d, room = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, ROOM)
    q_at = (request * Q_HEADS + head * GROUP + row)[:, None] * D + d[None, :]
    live_q = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at, mask=live_q, other=0.0)
    last_used = tl.load(last_used_ptr + partition * SLOTS + room, mask=room < SLOTS, other=2147483647)
    block_of = tl.load(block_of_ptr + partition * SLOTS + room, mask=room < SLOTS, other=-1)

    acc = tl.zeros((ROWS, WIDE), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    held = (tl.load(table_ptr + 2 * layers * width + layer_of) + 1).to(tl.int32)
    k_near = tl.multiple_of(tl.load(table_ptr + layer_of).to(tl.pointer_type(kind)), 16) + head * D
    v_near = tl.multiple_of(tl.load(table_ptr + (layers * width + layer_of)).to(tl.pointer_type(kind)), 16) + head * D
    for first in range(0, held, STEP):
        acc, top, total = _fold(
            acc, top, total, q, k_near, v_near, first + tl.arange(0, STEP), held, scale, d, KV_HEADS * D, D, PRECISE,
            False,
        )  # fmt: skip

    lane, key = tl.arange(0, PADDED), tl.arange(0, KEYS)
    inside = (key % SIZE)[:, None] * D + d[None, :]
    low = tl.full((ROWS,), float("inf"), tl.float32)
    read, missed = 0, 0
    active = ranked > 0
    while active:
        there = (lane < MICRO) & (read + lane < ranked)
        block = tl.load(order_ptr + read + lane, mask=there, other=0).to(tl.int32)
        slot = tl.load(slot_of_ptr + block, mask=there, other=0)
        absent = there & (slot < 0)
        from_slot = slots_ptr.to(tl.int64) + slot.to(tl.int64) * (BLOCK * BYTES)
        start = tl.where(absent, host + block.to(tl.int64) * (BLOCK * BYTES), from_slot)
        start = tl.reshape(tl.broadcast_to(start[:, None], (PADDED, SIZE)), (KEYS,))
        base = tl.multiple_of(start.to(tl.pointer_type(kind)), 16)
        live = (key // SIZE < MICRO) & (read + key // SIZE < ranked)
        mask = live[:, None] & (d < D)[None, :]
        k = tl.load(base[:, None] + inside, mask=mask, other=0.0)
        v = tl.load(base[:, None] + SIZE * D + inside, mask=mask, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision=how) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        low = tl.minimum(low, _lowest_mass(scores, there, ROWS, PADDED, SIZE))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        acc = acc * fade[:, None] + tl.dot(weights.to(kind), v, input_precision=how)
        total = total * fade + tl.sum(weights, 1)
        top = higher

        absent_count = tl.sum(absent.to(tl.int32), 0)
        hit = tl.where(there, slot, -1)
        last_used = tl.where(
            tl.max((room[:, None] == hit[None, :]).to(tl.int32), 1) > 0, tl.maximum(last_used, now), last_used
        )
        if absent_count > 0:
            tl.debug_barrier()  # all threads have read the map
            for i in tl.static_range(MICRO):
                oldest = tl.min(last_used, 0)
                victim = tl.argmin(last_used, 0)
                admit = (tl.sum((absent & (lane == i)).to(tl.int32), 0) > 0) & (oldest < now)
                new = tl.sum(tl.where(lane == i, block, 0), 0)
                taken = (room == victim) & admit
                old = tl.sum(tl.where(taken, block_of, 0), 0)
                tl.store(slot_of_ptr + old, -1, mask=admit & (old >= 0))
                tl.store(slot_of_ptr + new, victim.to(tl.int32), mask=admit)
                block_of = tl.where(taken, new, block_of)
                last_used = tl.where(taken, now, last_used)
                to = slots_ptr + victim.to(tl.int64) * BLOCK + inside
                whole = (key // SIZE == tl.where(admit, i, PADDED))[:, None] & (d < D)[None, :]
                tl.store(to, k, mask=whole)
                tl.store(to + SIZE * D, v, mask=whole)
            tl.debug_barrier()  # all threads see the updated map
        missed += absent_count
        read = tl.minimum(read + MICRO, ranked)
        mass = tl.exp2(low - top - tl.log2(total))
        coverage = 1.0 / (1.0 + (ranked - read).to(tl.float32) * mass)
        if MEAN:
            share = tl.sum(tl.where(row < GROUP, coverage, 0.0), 0) / GROUP
        else:
            share = tl.min(tl.where(row < GROUP, coverage, 1.0), 0)
        active = (read < ranked) & ((share <= threshold) | (read < least) | (read.to(tl.float32) < part * ranked))

    tl.store(out_ptr + q_at, (acc / total[:, None]).to(kind), mask=live_q)
    tl.store(read_ptr + request * KV_HEADS + head, read)
    tl.store(missed_ptr + request * KV_HEADS + head, missed)
    tl.store(last_used_ptr + partition * SLOTS + room, last_used, mask=room < SLOTS)
    tl.store(block_of_ptr + partition * SLOTS + room, block_of, mask=room < SLOTS)


@triton.jit
def _lowest_mass(scores, there, ROWS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr):
    """Return the lowest log mass [ROWS] of the blocks that are `there` [PADDED], from scores [ROWS, PADDED * SIZE]."""
    each = tl.reshape(scores, (ROWS, PADDED, SIZE))
    best = tl.where(there[None, :], tl.max(each, 2), 0.0)
    mass = tl.sum(tl.exp2(each - best[:, :, None]), 2)
    mass = best + tl.log2(tl.where(there[None, :], mass, 1.0))
    return tl.min(tl.where(there[None, :], mass, float("inf")), 1)
