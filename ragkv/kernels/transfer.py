"""Stored blocks to their places in a context cache: numbers out of bytes, keys turned, rows written, all at once.

A block is some tokens of one layer of a chunk, K before RoPE, as bytes: exact, or in a byte a number with scales (see
`store/layout.py` and `store/quantise.py`, which say what lies where and what it means). Its rows go to neighbouring
rows of the layer's K and V and stand at neighbouring positions.

Both ends are addresses in a table on the device: blocks lie in a pool on the GPU or in page-locked host memory, which a
GPU reads in place, and the caches of all layers are found the same way. So one launch serves blocks of many chunks and
layers. This is the reference, in torch, which cannot read addresses and takes tensors instead; `triton_transfer.py` has
its Triton twin, with the same name and arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FIELDS = 5
"""Of an entry: the address of its first byte, its tokens, the addresses of its first rows of K and V, and the position
of its first token."""


@dataclass(frozen=True)
class TransferFormat:
    """What blocks are. body: `exact`, `int8` or `fp8` · block: tokens of a full one · dtype: of the cache, and of exact
    bodies · near: they lie in the device's own memory, not behind the bus."""

    body: str
    block: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    near: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K, or V, in a block, without scales."""
        return self.kv_heads * self.head_dim * (self.dtype.itemsize if self.body == "exact" else 1)

    @property
    def limit(self) -> float:
        """The largest number that comes out: a scale that was rounded up must not make an infinity."""
        return min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class PinnedBlocks:
    """Blocks where they lie, and stay until `release` is called, by whoever has read them.

    addresses [m] int64 (CPU): of their first bytes, layer by layer, in the order in which they were asked for · layers,
    blocks [m] likewise: which they are.
    """

    addresses: Tensor
    layers: Tensor
    blocks: Tensor
    form: TransferFormat
    release: Callable[[], None]


@dataclass(frozen=True)
class TransferTable:
    """What to carry, E blocks. table [FIELDS, E] int64, on the device: all that a kernel reads · raw [E] (uint8, whole
    blocks), k, v [E] (the rows they go to, [n, Hkv, d]): the same memory as tensors, for the reference."""

    table: Tensor
    raw: Sequence[Tensor] = ()
    k: Sequence[Tensor] = ()
    v: Sequence[Tensor] = ()


class TransferKernel(Protocol):
    """The reference, or its twin."""

    def __call__(
        self, entries: TransferTable, first: int, count: int, cos: Tensor, sin: Tensor, form: TransferFormat
    ) -> None:
        """As `carry`."""
        ...


def transfer_blocks(
    entries: TransferTable, first: int, count: int, cos: Tensor, sin: Tensor, form: TransferFormat
) -> None:
    """Carry the `count` entries from `first` on. cos, sin [P, d]: of all positions, in the cache's dtype."""
    for entry in range(first, first + count):
        tokens, position = int(entries.table[1, entry]), int(entries.table[4, entry])
        k, v = _numbers(entries.raw[entry], tokens, form)
        at = slice(position, position + tokens)
        low, high = k.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        entries.k[entry].copy_((k * cos[at, None]) + (turned * sin[at, None]))
        entries.v[entry].copy_(v)


def _numbers(raw: Tensor, tokens: int, form: TransferFormat) -> tuple[Tensor, Tensor]:
    """k, v [n, Hkv, d] of a block."""
    lines, size = raw.view(-1, form.row_bytes), (tokens, form.kv_heads, form.head_dim)
    if form.body == "exact":
        k, v = (lines[start : start + tokens].view(form.dtype).view(size) for start in (0, tokens))
        return k, v
    k_scales = lines[2 * tokens : 2 * tokens + 2].view(-1).view(torch.float16).view(size[1:]).float()
    behind = lines[2 * tokens + 2 :].view(-1)[: 2 * tokens * form.kv_heads]
    v_scales = behind.view(torch.float16).view(size[:2]).float().unsqueeze(-1)
    kind = torch.int8 if form.body == "int8" else torch.float8_e4m3fn
    codes = [lines[start : start + tokens].view(kind).view(size).float() for start in (0, tokens)]
    k, v = (
        (part * scales).clamp(-form.limit, form.limit).to(form.dtype)
        for part, scales in zip(codes, (k_scales, v_scales), strict=True)
    )
    return k, v
