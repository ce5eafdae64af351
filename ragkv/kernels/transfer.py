"""Transfer of stored blocks into a context cache: decode the bytes, rotate the keys and write the rows in one kernel.

A block holds some tokens of one layer of a chunk as bytes, with K before RoPE. Its body is exact, or quantised to one
byte a number with scales (`store/format/layout.py` and `store/format/quantise.py` define the format). The rows of a
block go to consecutive rows of the layer's K and V and have consecutive positions.

A table on the device holds the addresses of sources and destinations. Blocks are in a pool on the GPU or in page-locked
host memory, which a GPU reads in place. One launch therefore serves blocks of many chunks and layers.

This is the reference, in torch. It cannot read addresses and takes tensors instead. The Triton kernel
(`triton_transfer.py`) has the same name and signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FIELDS = 5
"""Fields of an entry: address of its first byte, number of tokens, address of its first row of K, of its first row of
V, and position of its first token."""


@dataclass(frozen=True)
class TransferFormat:
    """Format of the blocks of a transfer.

    Attributes:
        body: `exact`, `int8` or `fp8`.
        block: tokens of a full block.
        kv_heads: key/value heads.
        head_dim: dimensions of a head.
        dtype: dtype of the cache and of exact bodies.
        near: whether the blocks are in the device's own memory rather than in host memory.
    """

    body: str
    block: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    near: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in a block, without scales."""
        return self.kv_heads * self.head_dim * (self.dtype.itemsize if self.body == "exact" else 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block, without scales."""
        return 2 * self.block * self.row_bytes

    @property
    def limit(self) -> float:
        """Largest decoded number. A scale that was rounded up must not produce an infinity."""
        return min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class PinnedBlocks:
    """Blocks that stay at their addresses until `release` is called. The reader calls it when it is done.

    Attributes:
        addresses: [m] int64 (CPU). Address of each block's first byte, layer by layer, in the order of the request.
        layers: [m]. Layer of each block.
        blocks: [m]. Number of each block.
        form: format of all blocks.
        release: unpins the blocks.
    """

    addresses: Tensor
    layers: Tensor
    blocks: Tensor
    form: TransferFormat
    release: Callable[[], None]


@dataclass(frozen=True)
class TransferTable:
    """Sources and destinations of E blocks.

    Attributes:
        table: [FIELDS, E] int64, on the device. Triton kernels read nothing else.
        raw: [E] whole blocks as uint8 tensors, for the reference.
        k: [E] destination rows [n, Hkv, d], for the reference.
        v: likewise.
    """

    table: Tensor
    raw: Sequence[Tensor] = ()
    k: Sequence[Tensor] = ()
    v: Sequence[Tensor] = ()


class TransferKernel(Protocol):
    """`transfer_blocks` of this module, or the Triton kernel with the same signature."""

    def __call__(
        self, entries: TransferTable, first: int, count: int, cos: Tensor, sin: Tensor, form: TransferFormat
    ) -> None:
        """Transfer some entries."""
        ...


def transfer_blocks(
    entries: TransferTable, first: int, count: int, cos: Tensor, sin: Tensor, form: TransferFormat
) -> None:
    """Transfer `count` entries from number `first` on.

    Args:
        entries: sources and destinations.
        first: number of the first entry.
        count: number of entries.
        cos: [P, d], of all positions, in the dtype of the cache.
        sin: likewise.
        form: format of the blocks.
    """
    for entry in range(first, first + count):
        tokens, position = int(entries.table[1, entry]), int(entries.table[4, entry])
        k, v = decode_block(entries.raw[entry], tokens, form)
        at = slice(position, position + tokens)
        low, high = k.chunk(2, dim=-1)
        rotated = torch.cat((-high, low), dim=-1)
        entries.k[entry].copy_((k * cos[at, None]) + (rotated * sin[at, None]))
        entries.v[entry].copy_(v)


def decode_block(raw: Tensor, tokens: int, form: TransferFormat) -> tuple[Tensor, Tensor]:
    """Return k, v [n, Hkv, d] of a block of n tokens that begins at raw [bytes] uint8."""
    rows, size = raw.view(-1, form.row_bytes), (tokens, form.kv_heads, form.head_dim)
    if form.body == "exact":
        k, v = (rows[start : start + tokens].view(form.dtype).view(size) for start in (0, tokens))
        return k, v
    k_scales = rows[2 * tokens : 2 * tokens + 2].view(-1).view(torch.float16).view(size[1:]).float()
    behind = rows[2 * tokens + 2 :].view(-1)[: 2 * tokens * form.kv_heads]
    v_scales = behind.view(torch.float16).view(size[:2]).float().unsqueeze(-1)
    kind = torch.int8 if form.body == "int8" else torch.float8_e4m3fn
    codes = [rows[start : start + tokens].view(kind).view(size).float() for start in (0, tokens)]
    k, v = (
        (part * scales).clamp(-form.limit, form.limit).to(form.dtype)
        for part, scales in zip(codes, (k_scales, v_scales), strict=True)
    )
    return k, v
