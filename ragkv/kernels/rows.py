"""What a pass of many rows does in a layer between the joined product of q, k and v and attention: norms, RoPE, and K
and V to their slots in the cache.

    qkv [T, (Hq + 2 Hkv) d]   cos, sin [T, d]   slots [T] int32, below 0: the row's K and V are not written

This is the reference, in torch; its Triton twin (`triton_rows.py`) has the same name and signature. Both round where
the model's own modules round. What is left of a layer, `add_norm` and `gated`, is that of a decode step (steps.py).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ragkv.kernels import decode_step as steps
from ragkv.kernels.decode_step import HeadNorms, apply_norm, rotate
from ragkv.types import Shape

add_norm, gated = steps.add_norm, steps.gated


class RowKernels(Protocol):
    """What a pass is made of beside products and attention: the references, or their twins."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `steps.add_norm`."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """As `steps.gated`."""
        ...

    def rope_scatter(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        shape: Shape,
        norms: HeadNorms | None,
    ) -> Tensor:
        """RoPE, and rows to their slots."""
        ...


def rope_scatter(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k: Tensor, v: Tensor, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Rotated queries [T, Hq, d]; rotated keys and values go to rows `slots` of k, v [capacity, Hkv, d], no slot twice.

    norms: what queries and keys go through before, None: nothing.
    """
    asked, keys, values = split_qkv(qkv, shape)
    if norms is not None:
        asked, keys = apply_norm(asked, norms.weight[0], norms.eps), apply_norm(keys, norms.weight[1], norms.eps)
    written = slots >= 0
    to = slots[written].long()
    k[to], v[to] = rotate(keys, cos, sin)[written], values[written]
    return rotate(asked, cos, sin)


def raw_queries(qkv: Tensor, shape: Shape, norms: HeadNorms | None) -> Tensor:
    """q [T, Hq, d] before RoPE, of the joined product."""
    q = split_qkv(qkv, shape)[0]
    return q if norms is None else apply_norm(q, norms.weight[0], norms.eps)


def split_qkv(qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, d], k and v [T, Hkv, d] of the joined product, views."""
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = qkv.view(-1, sum(heads), shape.head_dim).split(heads, dim=1)
    return q, k, v
