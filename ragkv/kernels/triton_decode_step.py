"""The Triton kernels of `decode_step.py`: operations of a decode step between its matrix products.

Attention over the keys of a request is divided among programs (flash decoding). Each program takes one kv head with all
query heads that read it and one part of the keys, and stores its output and log-sum-exp. A second kernel merges the
parts. The number of parts is fixed at the launch; the number of keys is read from the table. The host never waits for
the device, so all of it can be recorded in a CUDA graph. Of one row the kernels are launched early (early_launch.py).
With more rows the programs that wait for attention take room from its own, and a step of 16 requests behind 16,384 keys
takes a tenth longer. Numbers are float32 internally and rounded where the models' own modules round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragkv.kernels.decode_step import CachePointers, HeadNorms
from ragkv.kernels.early_launch import early
from ragkv.types import Shape

LOG2_E = 1.4426950408889634
KEYS = 64
"""Keys that a program of `attend` reads at a time."""
PIECE = 1024
"""Numbers that a program of `gated` computes."""


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `decode_step.add_norm`. x and y must be contiguous."""
    both, normed = torch.empty_like(x), torch.empty_like(x)
    count, size = x.shape
    wide = triton.next_power_of_2(size)
    _add_norm[(count,)](
        x, y, weight, both, normed, eps, SIZE=size, WIDE=wide, num_warps=8 if wide > 2048 else 4, **_early(x)
    )
    return both, normed


def gated(gate_up: Tensor) -> Tensor:
    """Compute `decode_step.gated`. gate_up must be contiguous."""
    count, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, size, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(count, triton.cdiv(size, PIECE))](gate_up, out, SIZE=size, PIECE=PIECE, num_warps=4, **_early(gate_up))
    return out


def rope_append(
    qkv: Tensor, cos: Tensor, sin: Tensor, pointers: CachePointers, layer: int, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Compute `decode_step.rope_append`.

    qkv, cos and sin must be contiguous and have the dtype of the caches. The head size must be even.
    """
    count, d = qkv.shape[0], shape.head_dim
    q = torch.empty(count, shape.q_heads, d, dtype=qkv.dtype, device=qkv.device)
    weight, eps = (cos, 0.0) if norms is None else (norms.weight, norms.eps)  # a placeholder, not read
    _rope_append[(count, shape.q_heads + 2 * shape.kv_heads)](
        qkv, cos, sin, weight, pointers.table, q, layer, *pointers.table.shape[1:], eps,
        NORMED=norms is not None, Q_HEADS=shape.q_heads, KV_HEADS=shape.kv_heads, D=d,
        WIDE=triton.next_power_of_2(d // 2), num_warps=1, **_early(qkv),
    )  # fmt: skip
    return q


def attend(q: Tensor, pointers: CachePointers, layer: int, shape: Shape, *, scale: float, splits: int) -> Tensor:
    """Compute `decode_step.attend`.

    q must be contiguous and have the dtype of the caches, whose memory must begin at multiples of 16 bytes. `splits`
    must be a power of two.
    """
    count, q_heads, d = q.shape
    parts, lses = attend_parts(q, pointers, layer, shape, scale=scale, splits=splits)
    out = torch.empty_like(q)
    _merge[(count, q_heads)](
        parts, lses, out, Q_HEADS=q_heads, D=d, WIDE=_wide(d), SPLITS=splits, num_warps=8 if splits > 32 else 4,
        **_early(q),
    )  # fmt: skip
    return out


def attend_parts(
    q: Tensor, pointers: CachePointers, layer: int, shape: Shape, *, scale: float, splits: int
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, and leave the parts unmerged.

    Returns:
        The attention [W, splits, Hq, d] to each part of the keys, and its log-sum-exp [W, splits, Hq], of base 2.
    """
    count, q_heads, d = q.shape
    parts = torch.empty(count, splits, q_heads, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(count, splits, q_heads, dtype=torch.float32, device=q.device)
    _attend[(count, shape.kv_heads, splits)](
        q, pointers.table, parts, lses, layer, *pointers.table.shape[1:], scale * LOG2_E,
        Q_HEADS=q_heads, KV_HEADS=shape.kv_heads, D=d, WIDE=_wide(d), KEYS=KEYS,
        ROWS=max(16, triton.next_power_of_2(q_heads // shape.kv_heads)), PRECISE=q.dtype == torch.float32,
        num_warps=4, num_stages=3 if q.dtype.itemsize == 2 else 2, **_early(q),
    )  # fmt: skip
    return parts, lses


def _early(x: Tensor) -> dict[str, bool]:
    """Return the options of a launch for rows x [W, …]."""
    return early(x) if x.shape[0] == 1 else {"EARLY": False}


def _wide(d: int) -> int:
    """Return the lanes that hold a head of d numbers."""
    wide: int = max(16, triton.next_power_of_2(d))
    return wide


@triton.jit
def _add_norm(
    x_ptr, y_ptr, weight_ptr, both_ptr, normed_ptr, eps, SIZE: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr
):
    """Add and normalise one row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.arange(0, WIDE)
    live = lane < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + lane
    kind: tl.constexpr = x_ptr.dtype.element_ty
    both = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32) + tl.load(y_ptr + at, mask=live, other=0.0)
    both = both.to(kind)
    tl.store(both_ptr + at, both, mask=live)
    wide = both.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + lane, mask=live, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, (weight * wide.to(kind).to(tl.float32)).to(kind), mask=live)


@triton.jit
def _gated(gate_up_ptr, out_ptr, SIZE: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr):
    """Compute one piece of one row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    live = lane < SIZE
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + lane, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + lane, mask=live, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * SIZE + lane, (opened * up).to(kind), mask=live)


@triton.jit(do_not_specialize=["layer", "layers", "width"])
def _rope_append(
    qkv_ptr, cos_ptr, sin_ptr, weight_ptr, table_ptr, q_ptr, layer, layers, width, eps,
    NORMED: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one request and store it: queries first, then keys, then values.

    low, high: the halves of a head that RoPE rotates.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = D // 2
    of, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WIDE)
    live = lane < HALF
    kind: tl.constexpr = qkv_ptr.dtype.element_ty
    row = qkv_ptr + (of * (Q_HEADS + 2 * KV_HEADS) + head).to(tl.int64) * D
    low = tl.load(row + lane, mask=live, other=0.0).to(tl.float32)
    high = tl.load(row + HALF + lane, mask=live, other=0.0).to(tl.float32)
    if head < Q_HEADS + KV_HEADS:
        if NORMED:
            norm = weight_ptr + (head >= Q_HEADS).to(tl.int32) * D
            shrink = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
            low = (low * shrink).to(kind).to(tl.float32) * tl.load(norm + lane, mask=live, other=0.0)
            high = (high * shrink).to(kind).to(tl.float32) * tl.load(norm + HALF + lane, mask=live, other=0.0)
            low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
        cos = tl.load(cos_ptr + of * D + lane, mask=live, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + of * D + lane, mask=live, other=0.0).to(tl.float32)
        rotated_low = (low * cos).to(kind).to(tl.float32) - (high * sin).to(kind).to(tl.float32)
        rotated_high = (high * cos).to(kind).to(tl.float32) + (low * sin).to(kind).to(tl.float32)
        low, high = rotated_low, rotated_high
    if head < Q_HEADS:
        to = q_ptr + (of * Q_HEADS + head).to(tl.int64) * D
        tl.store(to + lane, low.to(kind), mask=live)
        tl.store(to + HALF + lane, high.to(kind), mask=live)
    else:
        # Keys go to the first address of the table, values to the second.
        second = (head >= Q_HEADS + KV_HEADS).to(tl.int32)
        entry = table_ptr + layer * width + of
        length = tl.load(entry + 2 * layers * width)
        base = tl.multiple_of(tl.load(entry + second * layers * width).to(tl.pointer_type(kind)), 16)
        to = base + (length * KV_HEADS + head - Q_HEADS - second * KV_HEADS) * D
        tl.store(to + lane, low.to(kind), mask=live)
        tl.store(to + HALF + lane, high.to(kind), mask=live)


@triton.jit(do_not_specialize=["layer", "layers", "width"])
def _attend(
    q_ptr, table_ptr, parts_ptr, lses_ptr, layer, layers, width, scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, PRECISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend with all query heads of one kv head of one request to one part of its keys.

    The log-sum-exp of a part without keys is -inf.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    of, head, part, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    kind: tl.constexpr = q_ptr.dtype.element_ty
    entry = table_ptr + layer * width + of
    count = (tl.load(entry + 2 * layers * width) + 1).to(tl.int32)
    # The compiler cannot know how addresses from a table are aligned. Without the hint it reads every number alone.
    k_base = tl.multiple_of(tl.load(entry).to(tl.pointer_type(kind)), 16) + head * D
    v_base = tl.multiple_of(tl.load(entry + layers * width).to(tl.pointer_type(kind)), 16) + head * D
    blocks = tl.cdiv(count, KEYS)  # balanced: parts differ by at most one block
    start = part * blocks // parts * KEYS
    stop = tl.minimum((part + 1) * blocks // parts * KEYS, count)
    whole = start + (stop - start) // KEYS * KEYS

    row, d, lane = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, KEYS)
    q_at = (of * Q_HEADS + head * GROUP + row)[:, None] * D + d[None, :]
    live = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at, mask=live, other=0.0)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(start, whole, KEYS):
        acc, top, total = _fold(
            acc, top, total, q, k_base, v_base, first + lane, count, scale, d, KV_HEADS * D, D, PRECISE, True
        )
    if whole < stop:
        acc, top, total = _fold(
            acc, top, total, q, k_base, v_base, whole + lane, stop, scale, d, KV_HEADS * D, D, PRECISE, False
        )

    seen_any = total > 0
    safe = tl.where(seen_any, total, 1.0)
    to = (of * parts + part).to(tl.int64) * Q_HEADS + head * GROUP + row
    tl.store(parts_ptr + to[:, None] * D + d[None, :], acc / safe[:, None], mask=live)
    tl.store(lses_ptr + to, tl.where(seen_any, top + tl.log2(safe), float("-inf")), mask=row < GROUP)


@triton.jit
def _fold(
    acc, top, total, q, k_base, v_base, key, stop, scale, d,
    STRIDE: tl.constexpr, D: tl.constexpr, PRECISE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add keys [KEYS] below `stop` to the running softmax of base 2. WHOLE: all keys are below `stop`."""
    how: tl.constexpr = "ieee" if PRECISE else "tf32"
    at = key.to(tl.int64)[:, None] * STRIDE + d[None, :]
    there = key < stop
    if WHOLE and d.shape[0] == D:
        k = tl.load(k_base + at)
        v = tl.load(v_base + at)
    else:
        mask = there[:, None] & (d < D)[None, :]
        k = tl.load(k_base + at, mask=mask, other=0.0)
        v = tl.load(v_base + at, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=how) * scale
    if not WHOLE:
        scores = tl.where(there[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=how)
    return acc, higher, total * fade + tl.sum(weights, 1)


@triton.jit
def _merge(
    parts_ptr, lses_ptr, out_ptr, Q_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head of one request, weighted by their shares of the softmax."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    of, head = tl.program_id(0), tl.program_id(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    at = (of * SPLITS + split).to(tl.int64) * Q_HEADS + head
    lse = tl.load(lses_ptr + at)
    weight = tl.exp2(lse - tl.max(lse, 0))
    parts = tl.load(parts_ptr + at[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + (of * Q_HEADS + head).to(tl.int64) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
