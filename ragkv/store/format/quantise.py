"""Quantised K and V: one byte per number. `Layout` says where each part of a block lies.

    K   one scale per KV head and dimension over the tokens of a block, because before RoPE a few channels are large in
        every token
    V   one scale per token and KV head

    int8   code = round(x / scale), scale = largest / 127      |x - x'| <= scale / 2
    fp8    code = float8_e4m3fn(x / scale), scale = largest / 448
                                                               |x - x'| <= max(|x| / 16, scale / 1024)

Scales are float16 and rounded up, so that no code overflows. The bounds hold before x' = code · scale is rounded to
the model's dtype. A channel of zeros has scale 0 and is restored as zeros.

A number that is not finite, or too large for a float16 scale, would spoil its whole channel. Such numbers are refused,
not clamped: a chunk that holds one is not stored, so every question that needs it encodes it again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.errors import NotQuantisable
from ragkv.store.format.layout import Layout


class QuantisedFormat(NamedTuple):
    """The number format of quantised codes.

    Attributes:
        dtype: The dtype of the codes.
        largest: The code of the largest number of a channel.
    """

    dtype: torch.dtype
    largest: float


PIECE = 2**18
"""Numbers that are converted at a time on a CPU."""

FORMS = {"int8": QuantisedFormat(torch.int8, 127.0), "fp8": QuantisedFormat(torch.float8_e4m3fn, 448.0)}


def quantise(k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Quantise blocks k, v [m, n, Hkv, d].

    Returns:
        The bytes [m, layout.bytes_of(n)], uint8, and whether they hold the numbers [], bool: false if one is not
        finite, or too large for a float16 scale. Both are on the device of k; see `refuse_unless`.
    """
    form, (many, tokens) = FORMS[layout.body], k.shape[:2]
    k_codes, k_scales = _encode(k, 1, form)
    v_codes, v_scales = _encode(v, 3, form)
    pieces = [piece.view(torch.uint8).flatten(1) for piece in (k_codes, v_codes, k_scales, v_scales)]
    rest = layout.bytes_of(tokens) - sum(piece.shape[1] for piece in pieces)
    pieces.append(torch.zeros((many, rest), dtype=torch.uint8, device=k.device))
    return torch.cat(pieces, dim=1), k_scales.isfinite().all() & v_scales.isfinite().all()


def refuse_unless(quantisable: Tensor) -> None:
    """Raise NotQuantisable unless the second result of `quantise` is true."""
    if not quantisable:
        raise NotQuantisable("K or V holds infinities, NaN or numbers too large for a float16 scale")


def dequantise(raw: Tensor, begin: NDArray[np.int64], counts: NDArray[np.int64], layout: Layout, out: Tensor) -> None:
    """Restore K and V of m blocks from their bytes.

    Args:
        raw: Bytes that hold the blocks, uint8, on the device of `out`.
        begin: [m], the row of `raw` where each block begins.
        counts: [m], the tokens of each block.
        layout: The chunk's layout.
        out: [2, sum of counts, Hkv, d], filled with K and V in the model's dtype.
    """
    form, shape = FORMS[layout.body], layout.shape
    row, rows, before = layout.row_bytes, int(counts.sum()), counts.cumsum() - counts
    token = np.arange(rows)
    codes_at = token + (begin - before).repeat(counts)
    # A token's scales of V are 2 · Hkv bytes; a row is d / 2 times as long.
    v_at = token + ((begin + 2 * counts + 2) * (shape.head_dim // 2) - before).repeat(counts)
    k_at = np.stack([begin + 2 * counts, begin + 2 * counts + 1], axis=1).ravel()
    block = np.arange(len(counts)).repeat(counts)
    # All indices cross to the device at once.
    index = torch.from_numpy(np.concatenate([codes_at, codes_at + counts.repeat(counts), v_at, block, k_at]))
    *per_token, at_k = index.to(raw.device).split([rows] * 4 + [len(k_at)])
    lines = raw.view(-1, row)
    k_scales = lines.index_select(0, at_k).view(torch.float16).view(-1, shape.kv_heads, shape.head_dim).float()
    # A scale that was rounded up must not lift the largest float16 to infinity.
    limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)
    # A CPU works in pieces that fit its caches. Otherwise the whole load would go to memory and back between steps.
    step = max(1, PIECE // row) if raw.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        at_k_codes, at_v_codes, at_v, of_block = (at[start : start + step] for at in per_token)
        k = _decode(lines.index_select(0, at_k_codes), form).view(-1, shape.kv_heads, shape.head_dim)
        v = _decode(lines.index_select(0, at_v_codes), form).view(-1, shape.kv_heads, shape.head_dim)
        v_scales = raw.view(-1, 2 * shape.kv_heads).index_select(0, at_v).view(torch.float16).float()
        out[0, start : start + step] = k.mul_(k_scales.index_select(0, of_block)).clamp_(-limit, limit)
        out[1, start : start + step] = v.mul_(v_scales.unsqueeze(-1)).clamp_(-limit, limit)


def _decode(codes: Tensor, form: QuantisedFormat) -> Tensor:
    """Convert codes, given as bytes, to float32."""
    if form.dtype == torch.int8:
        return codes.view(torch.int8).float()
    # An e4m3 number shifted left by 7 bits is a float16 whose exponent bias is 15 instead of 7. So it is 2^8 too small,
    # subnormals included. On a CPU torch's own conversion takes ten times as long.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float().mul_(256.0)


def _encode(x: Tensor, dim: int, form: QuantisedFormat) -> tuple[Tensor, Tensor]:
    """Return codes and float16 scales, with one scale for all numbers along `dim`. A scale may be infinite or NaN."""
    x = x.detach().float()
    scale = x.abs().amax(dim, keepdim=True) / form.largest
    half = scale.half()
    half = torch.where(half.float() < scale, torch.nextafter(half, torch.full_like(half, torch.inf)), half)
    parts = x / half.float().masked_fill(half == 0, 1.0)
    codes = (parts.round() if form.dtype == torch.int8 else parts).to(form.dtype)
    return codes.contiguous(), half.squeeze(dim).contiguous()
