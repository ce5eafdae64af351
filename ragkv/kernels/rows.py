"""Operations of a pass of many rows between the merged q, k, v projection and attention.

These are head norms, RoPE, and the write of K and V to their cache slots.

    qkv [T, (Hq + 2 Hkv) d]   cos, sin [T, d]   slots [T] int32; K and V of a row with a negative slot are not written

This is the reference, in torch. The Triton kernel (`triton_rows.py`) has the same name and signature. Both round where
the model's own modules round. `add_norm` and `gated` are those of a decode step.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ragkv.kernels import decode_step
from ragkv.kernels.decode_step import HeadNorms, apply_norm, rotate
from ragkv.types import Shape

add_norm, gated = decode_step.add_norm, decode_step.gated


class RowKernels(Protocol):
    """The functions of this module, or the Triton kernels with the same signatures."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add and normalise, as `decode_step.add_norm`."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Apply the activation, as `decode_step.gated`."""
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
        """Apply RoPE and write rows to their slots."""
        ...


def rope_scatter(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k: Tensor, v: Tensor, shape: Shape, norms: HeadNorms | None
) -> Tensor:
    """Apply head norms and RoPE, and write rotated keys and values to rows `slots` of k, v [capacity, Hkv, d].

    No slot may occur twice.

    Returns:
        The rotated queries [T, Hq, d].
    """
    queries, keys, values = split_qkv(qkv, shape)
    if norms is not None:
        queries, keys = apply_norm(queries, norms.weight[0], norms.eps), apply_norm(keys, norms.weight[1], norms.eps)
    written = slots >= 0
    to = slots[written].long()
    k[to], v[to] = rotate(keys, cos, sin)[written], values[written]
    return rotate(queries, cos, sin)


def raw_queries(qkv: Tensor, shape: Shape, norms: HeadNorms | None) -> Tensor:
    """Return the pre-RoPE queries [T, Hq, d] of the merged projection."""
    q = split_qkv(qkv, shape)[0]
    return q if norms is None else apply_norm(q, norms.weight[0], norms.eps)


def split_qkv(qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, Hq, d], k and v [T, Hkv, d] as views of the merged projection."""
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = qkv.view(-1, sum(heads), shape.head_dim).split(heads, dim=1)
    return q, k, v
