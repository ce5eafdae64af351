"""The body of one decoder layer, shared by the fused loop and by CUDA graphs.

A layer is: merged q, k, v projection, RoPE and attention, output projection, residual and norm, gated MLP, residual and
norm. The callers differ only in RoPE, cache writes and attention, which they pass as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ragkv.model.execution.merged_weights import MergedLayer

AttendRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Merged projection [T, (Hq + 2 Hkv) d] -> hidden states [O, hidden] of the rows that go on, their attention [O, Hq,
d]."""


class LayerKernels(Protocol):
    """Operations between the products of a layer; see `kernels.decode_step`."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add and normalise."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Apply the activation of the MLP."""
        ...


class LayerState(NamedTuple):
    """Rows between two layers.

    Attributes:
        hidden: [T, hidden]. The residual stream.
        normed: [T, hidden]. The same rows behind the next norm.
    """

    hidden: Tensor
    normed: Tensor


def run_layer(layer: MergedLayer, kernels: LayerKernels, normed: Tensor, attend: AttendRows) -> LayerState:
    """Run one layer.

    Args:
        layer: the weights.
        kernels: the operations between products.
        normed: [T, hidden]. Rows behind the layer's first norm.
        attend: applies RoPE, writes K and V to the cache and attends. It returns fewer rows where rows leave the pass.

    Returns:
        The rows that go on. There are none where `attend` returns none, and then the rest of the layer is skipped.
    """
    hidden, attended = attend(layer.qkv_proj(normed))
    if not attended.shape[0]:
        return LayerState(hidden, normed[:0])
    norm = layer.post_attention_norm
    hidden, normed = kernels.add_norm(hidden, layer.o_proj(attended.flatten(1)), norm.weight, norm.eps)
    mlp = layer.down_proj(kernels.gated(layer.gate_up_proj(normed)))
    return LayerState(*kernels.add_norm(hidden, mlp, layer.next_norm.weight, layer.next_norm.eps))
