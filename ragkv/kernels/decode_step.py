"""Operations of a decode step between its matrix products, for W requests with one new token each.

    x, y [W, hidden]   qkv [W, (Hq + 2 Hkv) d], the merged projection of one layer   cos, sin [W, d]

Each request has its own cache in every layer: K and V [capacity, Hkv, d], keys rotated, rows in any order. A table on
the device holds the addresses of the caches and their numbers of rows. A step reads the table, so a CUDA graph that was
recorded once works for any caches. The new row is appended at the latest position, so the number of rows alone decides
what a query sees.

These are the references, in torch. The Triton kernels (`triton_decode_step.py`) have the same names and signatures; the
caller chooses one set (`StepKernels`). Both round where the model's own modules round.
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
"""Programs that attention is divided into where there are enough keys: two for each multiprocessor of a GPU."""
MIN_KEYS = 128
"""Smallest number of keys in a split. Merging smaller splits costs more than it saves."""
MAX_SPLITS = 64
"""Largest number of splits of one request's keys."""


@dataclass(frozen=True)
class CachePointers:
    """Addresses of the K and V caches of the requests in a step.

    Attributes:
        table: [3, L, W] int64, on the device: the address of K's first row, the address of V's first row, and the
            number of rows without the new one. Triton kernels read nothing else.
        k: [L][W] tensors [capacity, Hkv, d] over the same memory, for the references, which cannot read addresses.
        v: likewise.
    """

    table: Tensor
    k: Sequence[Sequence[Tensor]] = ()
    v: Sequence[Sequence[Tensor]] = ()


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of query and key heads, applied before RoPE.

    Attributes:
        weight: [2, d]. The weight for queries, then for keys.
        eps: added to the mean square.
    """

    weight: Tensor
    eps: float


class StepKernels(Protocol):
    """The functions of this module, or the Triton kernels with the same signatures."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add and normalise."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Apply the activation between the products of an MLP."""
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
        """Apply RoPE and append the new rows to their caches."""
        ...

    def attend(
        self, q: Tensor, pointers: CachePointers, layer: int, shape: Shape, *, scale: float, splits: int
    ) -> Tensor:
        """Compute attention over each request's cache."""
        ...


def splits_of(width: int, kv_heads: int, rows: int) -> int:
    """Choose the number of splits, a power of two, of each request's keys.

    Any number gives the same attention. It is fixed when a step is recorded, and later caches may be longer.

    Args:
        width: number of requests.
        kv_heads: key/value heads.
        rows: rows of the longest cache.
    """
    splits = min(PROGRAMS // (width * kv_heads), rows // MIN_KEYS, MAX_SPLITS)
    return 1 << max(0, splits.bit_length() - 1)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + y and its RMS norm times weight [hidden]."""
    total = x + y
    return total, apply_norm(total, weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [W, intermediate] of the merged projection [W, 2 * intermediate], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_append(
    qkv: Tensor, cos: Tensor, sin: Tensor, pointers: CachePointers, layer: int, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Apply head norms and RoPE, and append each request's rotated key and value to its cache.

    Returns:
        The rotated queries [W, Hq, d].
    """
    q_heads, kv_heads = shape.q_heads, shape.kv_heads
    q, k, v = qkv.view(-1, q_heads + 2 * kv_heads, shape.head_dim).split((q_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = apply_norm(q, norms.weight[0], norms.eps), apply_norm(k, norms.weight[1], norms.eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    for request, length in enumerate(pointers.table[2, layer].tolist()):
        pointers.k[layer][request][length], pointers.v[layer][request][length] = k[request], v[request]
    return q


def attend(q: Tensor, pointers: CachePointers, layer: int, shape: Shape, *, scale: float, splits: int) -> Tensor:
    """Compute attention [W, Hq, d] of q [W, Hq, d] to all rows of each request, the new one included.

    Args:
        q: the rotated queries.
        pointers: the caches.
        layer: the layer.
        shape: the model's shape.
        scale: factor of the scores.
        splits: parts into which the Triton kernel divides the keys. The reference ignores it.
    """
    lengths = pointers.table[2, layer].tolist()
    wide, out = torch.promote_types(q.dtype, torch.float32), torch.empty_like(q)
    for request, length in enumerate(lengths):
        k, v = (store[layer][request][: length + 1].to(wide) for store in (pointers.k, pointers.v))
        queries = q[request].to(wide).view(shape.kv_heads, -1, shape.head_dim)
        weights = (torch.einsum("ghd,ngd->ghn", queries, k) * scale).softmax(-1)
        out[request] = torch.einsum("ghn,ngd->ghd", weights, v).reshape(q.shape[1:])
    return out


def apply_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x [..., size] as the models compute it: in float32, whatever the dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [W, heads, d]."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos[:, None]) + (torch.cat((-high, low), dim=-1) * sin[:, None])
