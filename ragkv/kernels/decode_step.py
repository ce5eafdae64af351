"""What a decode step does beside its matrix products: W requests with one new token each.

    x, y [W, hidden]   qkv [W, (Hq + 2 Hkv) d], the joined product of one layer   cos, sin [W, d]

Each request has a cache of its own for every layer, K and V [capacity, Hkv, d], keys rotated, rows in any order. A step
finds them by their addresses in a table on the device, and reads there, too, how many rows they hold: so what was
recorded once as a graph serves whatever caches requests have. The new row stands behind all others at the latest
position, so nothing but the length decides what a query sees.

These are the references, in torch. Their Triton twins (`triton_decode_step.py`) have the same names and signatures; who makes
a step takes one set or the other (`Kernels`). Both round where the model's own modules round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.types import Shape

PROGRAMS = 256
"""Parts that attention is divided into at least, as far as there are keys: two for each multiprocessor of a GPU."""
LEAST = 128
"""Keys of a part, at least: fewer are not worth merging."""
MOST = 64
"""Parts of one request's keys."""


@dataclass(frozen=True)
class CachePointers:
    """Where the requests of a step keep K and V.

    table [3, L, W] int64, on the device: address of K's first row, address of V's, rows held without the new one; it is
    all that kernels read · k, v [L][W]: the same memory as tensors [capacity, Hkv, d], for the references, which cannot
    read addresses
    """

    table: Tensor
    k: Sequence[Sequence[Tensor]] = ()
    v: Sequence[Sequence[Tensor]] = ()


@dataclass(frozen=True)
class HeadNorms:
    """Norms that queries and keys go through before RoPE. weight [2, d]: of queries, of keys."""

    weight: Tensor
    eps: float


class StepKernels(Protocol):
    """The references of this module, or their twins; arguments and results are described there."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """A sum and its norm."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """What an MLP has between its products."""
        ...

    def rope_append(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        pointers: CachePointers,
        layer: int,
        shape: Shape,
        norms: HeadNorms | None,
    ) -> Tensor:
        """RoPE, and the new rows to their caches."""
        ...

    def attend(
        self, q: Tensor, pointers: CachePointers, layer: int, shape: Shape, *, scale: float, splits: int
    ) -> Tensor:
        """Attention over each request's cache."""
        ...


def splits_of(width: int, kv_heads: int, rows: int) -> int:
    """Into how many parts, a power of two, the keys of each of `width` requests are divided, the longest having `rows`.

    Any number gives the same attention: it is chosen when a step is recorded, and other lengths may come.
    """
    wanted = min(PROGRAMS // (width * kv_heads), rows // LEAST, MOST)
    return 1 << max(0, wanted.bit_length() - 1)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its RMS norm times weight [hidden])."""
    both = x + y
    return both, apply_norm(both, weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [W, intermediate] of the joined product [W, 2 * intermediate], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_append(
    qkv: Tensor, cos: Tensor, sin: Tensor, pointers: CachePointers, layer: int, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Rotated queries [W, Hq, d]; the rotated key and the value of each request go behind the rows it holds.

    norms: what queries and keys go through before, None: nothing.
    """
    q_heads, kv_heads = shape.q_heads, shape.kv_heads
    q, k, v = qkv.view(-1, q_heads + 2 * kv_heads, shape.head_dim).split((q_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = apply_norm(q, norms.weight[0], norms.eps), apply_norm(k, norms.weight[1], norms.eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    for each, held in enumerate(pointers.table[2, layer].tolist()):
        pointers.k[layer][each][held], pointers.v[layer][each][held] = k[each], v[each]
    return q


def attend(q: Tensor, pointers: CachePointers, layer: int, shape: Shape, *, scale: float, splits: int) -> Tensor:
    """Attention [W, Hq, d] of q [W, Hq, d] to all rows that each request holds, the new one included.

    splits: parts that the twin divides keys into; the reference takes them as one.
    """
    held = pointers.table[2, layer].tolist()
    wide, out = torch.promote_types(q.dtype, torch.float32), torch.empty_like(q)
    for each, rows in enumerate(held):
        k, v = (store[layer][each][: rows + 1].to(wide) for store in (pointers.k, pointers.v))
        asking = q[each].to(wide).view(shape.kv_heads, -1, shape.head_dim)
        shares = (torch.einsum("ghd,ngd->ghn", asking, k) * scale).softmax(-1)
        out[each] = torch.einsum("ghn,ngd->ghd", shares, v).reshape(q.shape[1:])
    return out


def apply_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., size], as the models' own, in float32 whatever x is."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [W, heads, d]."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos[:, None]) + (torch.cat((-high, low), dim=-1) * sin[:, None])
