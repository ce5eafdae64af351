"""The Triton kernels of `head_mean.py`: one finds the softmax sums of every row and head, one adds the heads up.

Scores are computed twice and never stored. Unlike in the reference they stay in float32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, KEYS = 64, 128
"""Rows and keys of a tile."""


def mean_attention(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Compute `head_mean.mean_attention`."""
    q, k = q.contiguous(), k.contiguous()
    (layers, rows, q_heads, d), (keys, kv_heads) = q.shape, k.shape[1:3]
    sums = torch.empty(layers, q_heads, rows, dtype=torch.float32, device=q.device)
    out = torch.zeros(layers, rows, keys, dtype=torch.float32, device=q.device)
    sizes = {
        "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "D": d, "PADDED": max(16, triton.next_power_of_2(d)),
        "ROWS": ROWS, "KEYS": KEYS,
    }  # fmt: skip
    tiles, in_bits = triton.cdiv(rows, ROWS), scale * math.log2(math.e)
    _log_sums[(tiles, q_heads, layers)](q, k, sums, rows, keys, in_bits, **sizes, num_warps=4)
    _head_mean[(tiles, triton.cdiv(keys, KEYS), layers)](q, k, sums, out, rows, keys, in_bits, **sizes, num_warps=8)
    return out


@triton.jit
def _load_heads(ptr, row, head, count, HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """Load [rows, PADDED] of one attention head; zeros beyond `count` rows."""
    lane = tl.arange(0, PADDED)
    inside = (row < count)[:, None] & (lane < D)[None, :]
    return tl.load(ptr + (row[:, None].to(tl.int64) * HEADS + head) * D + lane[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "keys", "scale"])
def _log_sums(
    q_ptr, k_ptr, sums_ptr, rows, keys, scale, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the binary logarithm of the sum of 2 ** score of the rows of a tile, for one head of one layer."""
    tile, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_ptr += layer * rows * Q_HEADS * D
    k_ptr += layer * keys * KV_HEADS * D
    before = keys - rows
    row = tile * ROWS + tl.arange(0, ROWS)
    q = _load_heads(q_ptr, row, head, rows, Q_HEADS, D, PADDED)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tl.minimum(before + (tile + 1) * ROWS, keys), KEYS):
        key = start + tl.arange(0, KEYS)
        k = _load_heads(k_ptr, key, head // (Q_HEADS // KV_HEADS), keys, KV_HEADS, D, PADDED)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(key[None, :] <= before + row[:, None], scores, float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 1))
        total = total * tl.exp2(top - larger) + tl.sum(tl.exp2(scores - larger[:, None]), 1)
        top = larger
    tl.store(sums_ptr + (layer * Q_HEADS + head) * rows + row, top + tl.log2(total), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "keys", "scale"])
def _head_mean(
    q_ptr, k_ptr, sums_ptr, out_ptr, rows, keys, scale, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the mean over the heads of one tile of one layer. A tile that no row sees stays zero."""
    tile, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    before = keys - rows
    if tl.program_id(1) * KEYS < before + (tile + 1) * ROWS:
        q_ptr += layer * rows * Q_HEADS * D
        k_ptr += layer * keys * KV_HEADS * D
        sums_ptr += layer * Q_HEADS * rows
        row = tile * ROWS + tl.arange(0, ROWS)
        key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        total = tl.zeros((ROWS, KEYS), tl.float32)
        for kv_head in range(KV_HEADS):
            k = tl.trans(_load_heads(k_ptr, key, kv_head, keys, KV_HEADS, D, PADDED))
            for member in range(Q_HEADS // KV_HEADS):
                head = kv_head * (Q_HEADS // KV_HEADS) + member
                q = _load_heads(q_ptr, row, head, rows, Q_HEADS, D, PADDED)
                sums = tl.load(sums_ptr + head * rows + row, mask=row < rows, other=0.0)
                total += tl.exp2(tl.dot(q, k) * scale - sums[:, None])
        seen = key[None, :] <= before + row[:, None]
        inside = (row < rows)[:, None] & (key < keys)[None, :]
        at = layer * rows * keys + row[:, None].to(tl.int64) * keys + key[None, :]
        tl.store(out_ptr + at, tl.where(seen, total / Q_HEADS, 0.0), mask=inside)
