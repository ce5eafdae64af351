"""K and V in a byte a number: a block of one layer to its bytes (`Layout` says where each part lies) and back.

    K   one scale per kv head and dimension over the block's tokens: before RoPE a few channels are large in every token
    V   one scale per token and kv head

    int8   code = round(x / scale), scale = largest / 127      |x - x'| <= scale / 2
    fp8    code = float8_e4m3fn(x / scale), scale = largest / 448
                                                               |x - x'| <= max(|x| / 16, scale / 1024)

Scales are float16, rounded up, so that no code overflows. The bounds hold before x' = code · scale is rounded to the
model's dtype. A channel of zeros has scale 0 and comes back as zeros.

Numbers that are not finite, or so large that float16 cannot hold their scale, would take their whole channel with them.
They are refused, not clamped: a chunk that holds any is not stored, and costs an encoding whenever it is asked for.
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
    """dtype: of the codes · largest: code that a scale maps the largest number to."""

    dtype: torch.dtype
    largest: float


PIECE = 2**18
"""Numbers turned at a time on a CPU."""

FORMS = {"int8": QuantisedFormat(torch.int8, 127.0), "fp8": QuantisedFormat(torch.float8_e4m3fn, 448.0)}


def quantise(k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Blocks k, v [m, n, Hkv, d] -> their bytes [m, layout.bytes_of(n)] uint8. Raises NotQuantisable."""
    form, (many, tokens) = FORMS[layout.body], k.shape[:2]
    k_codes, k_scales = _coded(k, 1, form)
    v_codes, v_scales = _coded(v, 3, form)
    pieces = [piece.flatten(1) for piece in (k_codes, v_codes, k_scales, v_scales)]
    pieces.append(torch.zeros((many, layout.bytes_of(tokens) - sum(p.shape[1] for p in pieces)), dtype=torch.uint8))
    return torch.cat(pieces, dim=1)


def dequantise(raw: Tensor, begin: NDArray[np.int64], counts: NDArray[np.int64], layout: Layout, out: Tensor) -> None:
    """Blocks as bytes, anywhere in `raw` (uint8, on the device of `out`), into out [2, sum of counts, Hkv, d].

    begin [m]: the row where each block begins · counts [m]: its tokens.
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
    # On a CPU in pieces that its caches hold: between the steps, whole questions would go out to memory and back.
    step = max(1, PIECE // row) if raw.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        at_k_codes, at_v_codes, at_v, of_block = (at[start : start + step] for at in per_token)
        k = _numbers(lines.index_select(0, at_k_codes), form).view(-1, shape.kv_heads, shape.head_dim)
        v = _numbers(lines.index_select(0, at_v_codes), form).view(-1, shape.kv_heads, shape.head_dim)
        v_scales = raw.view(-1, 2 * shape.kv_heads).index_select(0, at_v).view(torch.float16).float()
        out[0, start : start + step] = k.mul_(k_scales.index_select(0, of_block)).clamp_(-limit, limit)
        out[1, start : start + step] = v.mul_(v_scales.unsqueeze(-1)).clamp_(-limit, limit)


def _numbers(codes: Tensor, form: QuantisedFormat) -> Tensor:
    """Codes, as bytes, as float32."""
    if form.dtype == torch.int8:
        return codes.view(torch.int8).float()
    # e4m3 moved up by 7 bits is a float16 whose exponent counts from 15, not 7: 2^8 too small, subnormals included.
    # On a CPU torch's own conversion takes ten times as long.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).float().mul_(256.0)


def _coded(x: Tensor, dim: int, form: QuantisedFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales as bytes (the last axis is bytes); one scale for all numbers along `dim`."""
    x = x.detach().float()
    scale = x.abs().amax(dim, keepdim=True) / form.largest
    half = scale.half()
    half = torch.where(half.float() < scale, torch.nextafter(half, torch.full_like(half, torch.inf)), half)
    if not half.isfinite().all():
        raise NotQuantisable("K or V holds infinities, NaN or numbers too large for a float16 scale")
    parts = x / half.float().masked_fill(half == 0, 1.0)
    codes = (parts.round() if form.dtype == torch.int8 else parts).to(form.dtype)
    return codes.contiguous().view(torch.uint8), half.squeeze(dim).contiguous().view(torch.uint8)
