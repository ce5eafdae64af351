"""The Triton kernels of `pool.py`: one program reads the blocks of one kv head of one request.

A program reads the map from blocks to slots once for each of its blocks and updates the entries of its own blocks only,
so programs meet in nothing but the counter of the free list. A barrier stands between reading an entry and updating it,
because the threads of a program read it one after another. The loop over blocks is a `while`, which Triton does not
pipeline.

A block without a slot is read from pinned host memory by its address and written to its slot from the registers, so it
crosses the bus once. Numbers are float32 internally, logarithms of base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragkv.kernels.pool import PooledRows, PoolRead, StopRule
from ragkv.kernels.slots import SlotPool
from ragkv.kernels.triton_decode_step import LOG2_E, _fold
from ragkv.types import Shape

NEAR = 64
"""Near rows that are read at a time."""


def attend_progressively(
    q: Tensor,
    order: Tensor,
    pool: SlotPool,
    rows: PooledRows,
    layer: int,
    shape: Shape,
    rule: StopRule,
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
    slots, size = pool.slots.shape[0], _block_rows(pool)
    padded = max(triton.next_power_of_2(rule.micro), 16 // size)
    out = torch.empty_like(q)
    read = torch.empty(count, shape.kv_heads, dtype=torch.int32, device=q.device)
    missed = torch.empty_like(read)
    _attend_progressively[(count, shape.kv_heads)](
        q, order, rows.near.table, rows.host, rows.ranked, rows.first, rows.threshold, rows.clock, pool.slots,
        pool.slot_of, pool.block_of, pool.last_used, pool.free, pool.taken, out, read, missed, layer,
        rows.near.table.shape[1], count, order.shape[2], slots, pool.free.shape[0], scale * LOG2_E,
        Q_HEADS=q_heads, KV_HEADS=shape.kv_heads, D=d, WIDE=max(16, triton.next_power_of_2(d)), SIZE=size,
        MICRO=rule.micro, PADDED=padded, ROWS=max(16, triton.next_power_of_2(q_heads // shape.kv_heads)),
        STEP=NEAR, MEAN=rule.mean, PRECISE=q.dtype == torch.float32, num_warps=8, num_stages=2,
    )  # fmt: skip
    return PoolRead(out, read, missed)


def load_ahead(order: Tensor, read: Tensor, pool: SlotPool, rows: PooledRows, layer: int, loaded: Tensor) -> None:
    """Compute `pool.load_ahead`. order, read and loaded must be contiguous. Raises as `attend_progressively`."""
    (count, heads), (slots, d), size = read.shape, pool.slots.shape[::3], _block_rows(pool)
    _load_ahead[(count, heads)](
        order, read, rows.host, rows.clock, pool.slots, pool.slot_of, pool.block_of, pool.last_used, pool.free,
        pool.taken, loaded, layer, rows.host.shape[1], count, order.shape[2], slots, pool.free.shape[0],
        KV_HEADS=heads, D=d, WIDE=max(16, triton.next_power_of_2(d)), SIZE=size, num_warps=4,
    )  # fmt: skip


def _block_rows(pool: SlotPool) -> int:
    size = pool.slots.shape[2]
    if size & (size - 1):
        raise ValueError("a block must have a power of two of rows")
    return size


@triton.jit(do_not_specialize=["layer", "layers", "width", "most", "slots", "listed"])
def _attend_progressively(
    q_ptr, order_ptr, table_ptr, host_ptr, ranked_ptr, first_ptr, threshold_ptr, clock_ptr, slots_ptr, slot_of_ptr,
    block_of_ptr, last_used_ptr, free_ptr, taken_ptr, out_ptr, read_ptr, missed_ptr, layer, layers, width, most, slots,
    listed, scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    MICRO: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, MEAN: tl.constexpr,
    PRECISE: tl.constexpr,
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
    ranked = tl.load(ranked_ptr + layer_of).to(tl.int32)
    least = tl.load(first_ptr + layer_of).to(tl.int32)
    threshold = tl.load(threshold_ptr + request)
    clock = tl.load(clock_ptr)
    launch = clock * layers + layer
    order_ptr += (request * KV_HEADS + head).to(tl.int64) * most
    cell = (layer_of * KV_HEADS + head).to(tl.int64) * most
    k_host = tl.load(host_ptr + layer_of) + head * (D * BYTES)
    v_host = tl.load(host_ptr + (layers * width + layer_of)) + head * (D * BYTES)

    row, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    q_at = (request * Q_HEADS + head * GROUP + row)[:, None] * D + d[None, :]
    live_q = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at, mask=live_q, other=0.0)

    acc = tl.zeros((ROWS, WIDE), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    held = (tl.load(table_ptr + 2 * layers * width + layer_of) + 1).to(tl.int32)
    k_near = tl.multiple_of(tl.load(table_ptr + layer_of).to(tl.pointer_type(kind)), 16) + head * D
    v_near = tl.multiple_of(tl.load(table_ptr + (layers * width + layer_of)).to(tl.pointer_type(kind)), 16) + head * D
    for start in range(0, held, STEP):
        acc, top, total = _fold(
            acc, top, total, q, k_near, v_near, start + tl.arange(0, STEP), held, scale, d, KV_HEADS * D, D, PRECISE,
            False,
        )  # fmt: skip

    lane, key = tl.arange(0, PADDED), tl.arange(0, KEYS)
    inside = (key % SIZE)[:, None] * D + d[None, :]
    low = tl.full((ROWS,), float("inf"), tl.float32)
    read, missed = 0, 0
    active = ranked > 0
    while active:
        there = (lane < MICRO) & (read + lane < ranked)
        block = tl.load(order_ptr + read + lane, mask=there, other=0)
        slot = tl.load(slot_of_ptr + cell + block, mask=there, other=0).to(tl.int64)
        absent = there & (slot < 0)
        in_slot = slots_ptr.to(tl.int64) + slot * (BLOCK * BYTES)
        on_host = block * (SIZE * KV_HEADS * D * BYTES)
        k_start = tl.where(absent, k_host + on_host, in_slot)
        v_start = tl.where(absent, v_host + on_host, in_slot + SIZE * D * BYTES)
        stride = tl.where(absent, KV_HEADS * D * BYTES, D * BYTES)
        k_at = _each_key(k_start, PADDED, SIZE) + (key % SIZE) * _each_key(stride, PADDED, SIZE)
        v_at = _each_key(v_start, PADDED, SIZE) + (key % SIZE) * _each_key(stride, PADDED, SIZE)
        live = (key // SIZE < MICRO) & (read + key // SIZE < ranked)
        mask = live[:, None] & (d < D)[None, :]
        k = tl.load(tl.multiple_of(k_at.to(tl.pointer_type(kind)), 16)[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(tl.multiple_of(v_at.to(tl.pointer_type(kind)), 16)[:, None] + d[None, :], mask=mask, other=0.0)

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
        if clock > 0:
            tl.store(last_used_ptr + slot, launch, mask=there & (slot >= 0))
        if (absent_count > 0) & (clock > 0):
            tl.debug_barrier()  # all threads have read the map
            turn = tl.atomic_add(taken_ptr, absent_count) + tl.cumsum(absent.to(tl.int32), 0) - 1
            new = tl.load(free_ptr + turn, mask=absent & (turn < listed), other=slots)
            admit = absent & (turn < listed) & (new < slots)
            to = slots_ptr + (_each_key(new, PADDED, SIZE) * BLOCK)[:, None] + inside
            whole = (_each_key(admit.to(tl.int32), PADDED, SIZE) > 0)[:, None] & (d < D)[None, :]
            tl.store(to, k, mask=whole)
            tl.store(to + SIZE * D, v, mask=whole)
            tl.store(slot_of_ptr + cell + block, new.to(tl.int32), mask=admit)
            tl.store(block_of_ptr + new, cell + block, mask=admit)
            tl.store(last_used_ptr + new, launch, mask=admit)
        missed += absent_count
        read = tl.minimum(read + MICRO, ranked)
        mass = tl.exp2(low - top - tl.log2(total))
        coverage = 1.0 / (1.0 + (ranked - read).to(tl.float32) * mass)
        if MEAN:
            share = tl.sum(tl.where(row < GROUP, coverage, 0.0), 0) / GROUP
        else:
            share = tl.min(tl.where(row < GROUP, coverage, 1.0), 0)
        active = (read < ranked) & ((share <= threshold) | (read < least))

    tl.store(out_ptr + q_at, (acc / total[:, None]).to(kind), mask=live_q)
    tl.store(read_ptr + request * KV_HEADS + head, read)
    tl.store(missed_ptr + request * KV_HEADS + head, missed)


@triton.jit(do_not_specialize=["layer", "layers", "width", "most", "slots", "listed"])
def _load_ahead(
    order_ptr, read_ptr, host_ptr, clock_ptr, slots_ptr, slot_of_ptr, block_of_ptr, last_used_ptr, free_ptr, taken_ptr,
    loaded_ptr, layer, layers, width, most, slots, listed,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Load the blocks of one kv head of one request that the last step read and that have no slot."""
    BLOCK: tl.constexpr = 2 * SIZE * D
    request, head = tl.program_id(0), tl.program_id(1)
    kind: tl.constexpr = slots_ptr.dtype.element_ty
    layer_of = layer * width + request
    count = tl.load(read_ptr + request * KV_HEADS + head)
    launch = tl.load(clock_ptr) * layers + layer
    order_ptr += (request * KV_HEADS + head).to(tl.int64) * most
    cell = (layer_of * KV_HEADS + head).to(tl.int64) * most
    k_host = tl.multiple_of(tl.load(host_ptr + layer_of).to(tl.pointer_type(kind)), 16) + head * D
    v_host = tl.multiple_of(tl.load(host_ptr + (layers * width + layer_of)).to(tl.pointer_type(kind)), 16) + head * D
    row, d = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDE)[None, :]
    mask = (row < SIZE) & (d < D)
    loaded = 0
    for i in range(count):
        block = tl.load(order_ptr + i)
        if tl.load(slot_of_ptr + cell + block) < 0:
            tl.debug_barrier()  # all threads have read the map
            turn = tl.atomic_add(taken_ptr, 1)
            new = tl.load(free_ptr + tl.minimum(turn, listed - 1))
            if (turn < listed) & (new < slots):
                at = (block * SIZE + row) * (KV_HEADS * D) + d
                to = slots_ptr + new * BLOCK + row * D + d
                tl.store(to, tl.load(k_host + at, mask=mask, other=0.0), mask=mask)
                tl.store(to + SIZE * D, tl.load(v_host + at, mask=mask, other=0.0), mask=mask)
                tl.store(slot_of_ptr + cell + block, new.to(tl.int32))
                tl.store(block_of_ptr + new, cell + block)
                tl.store(last_used_ptr + new, launch)
                loaded += 1
    tl.store(loaded_ptr + request * KV_HEADS + head, loaded)


@triton.jit
def _each_key(blocks, PADDED: tl.constexpr, SIZE: tl.constexpr):
    """Repeat the value [PADDED] of each block for each of its keys [PADDED * SIZE]."""
    return tl.reshape(tl.broadcast_to(blocks[:, None], (PADDED, SIZE)), (PADDED * SIZE,))


@triton.jit
def _lowest_mass(scores, there, ROWS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr):
    """Return the lowest log mass [ROWS] of the blocks that are `there` [PADDED], from scores [ROWS, PADDED * SIZE]."""
    each = tl.reshape(scores, (ROWS, PADDED, SIZE))
    best = tl.where(there[None, :], tl.max(each, 2), 0.0)
    mass = tl.sum(tl.exp2(each - best[:, :, None]), 2)
    mass = best + tl.log2(tl.where(there[None, :], mass, 1.0))
    return tl.min(tl.where(there[None, :], mass, float("inf")), 1)
