"""The layers of a model over caches that are found by address, as recorded in CUDA graphs.

Rows, positions and cache pointers are tensors on the device, and kernels read everything else there, so a graph serves
any rows. The result is that of `DecoderModel.forward`, up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.kernels import decode_step as reference
from ragkv.kernels.decode_step import CachePointers, StepKernels
from ragkv.kernels.paged_attention import PagedAttention, attend_paged
from ragkv.kernels.rows import raw_queries
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.layer_body import LayerState, run_layer
from ragkv.model.execution.merged_weights import MergedLayer
from ragkv.model.rotary import Rotary

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, its rotated queries [O, Hq, d], the merged projection [W, (Hq + 2 Hkv) d]) -> their attention [O, Hq, d]"""


@dataclass(frozen=True)
class LayerStack:
    """A model with merged layers and the kernels that run them.

    Attributes:
        model: supplies embedding, rotary module, head and shape.
        layers: the merged layers to run.
        kernels: the operations between products.
    """

    model: DecoderModel
    layers: Sequence[MergedLayer]
    kernels: StepKernels


@dataclass(frozen=True)
class StackInputs:
    """Rows that enter a stack.

    Attributes:
        tokens: [W] int64, on the device.
        positions: [W] int64, on the device.
        pointers: the cache of each row. K and V are appended to it.
    """

    tokens: Tensor
    positions: Tensor
    pointers: CachePointers


def decode_layers(stack: LayerStack, inputs: StackInputs, attend: Attend, outputs: int | None = None) -> Tensor:
    """Run all layers and the head. The host does not wait for the device unless `attend` does.

    Args:
        stack: the layers.
        inputs: the rows.
        attend: computes attention.
        outputs: number of the last rows that attend in the last layer and give logits; None for all.

    Returns:
        Logits [W or outputs, vocabulary].
    """
    run = _StackRun(stack, inputs, stack.model.rotary(inputs.positions), attend)
    state, last = run.embed(), len(stack.layers) - 1
    for layer in range(len(stack.layers)):
        state = run.layer(layer, state, outputs if layer == last else None)
    logits: Tensor = stack.model.lm_head(state.normed)
    return logits


def query_layers(stack: LayerStack, inputs: StackInputs, attend: Attend) -> list[Tensor]:
    """Run the layers for their pre-RoPE queries [W, Hq, d] alone. The last layer computes nothing else."""
    run = _StackRun(stack, inputs, stack.model.rotary(inputs.positions), attend)
    state, queries = run.embed(), list[Tensor]()
    for layer in range(len(stack.layers) - 1):
        state = run.layer(layer, state, queries=queries)
    if not stack.layers:
        return queries
    last = stack.layers[-1]
    return [*queries, raw_queries(last.qkv_proj(state.normed), stack.model.shape, last.head_norms)]


@dataclass(frozen=True)
class _StackRun:
    """One run of a stack over given rows."""

    stack: LayerStack
    inputs: StackInputs
    rotary: Rotary
    attend: Attend

    def embed(self) -> LayerState:
        """Embed the tokens."""
        body = self.stack.model.body
        hidden = body.embed_tokens(self.inputs.tokens)
        return LayerState(hidden, body.layers[0].input_layernorm(hidden))

    def layer(
        self, layer: int, state: LayerState, outputs: int | None = None, queries: list[Tensor] | None = None
    ) -> LayerState:
        """Run one layer; only the last `outputs` rows attend and go on. Pre-RoPE queries are appended to `queries`."""
        weights, kernels, shape = self.stack.layers[layer], self.stack.kernels, self.stack.model.shape

        def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
            if queries is not None:
                queries.append(raw_queries(qkv, shape, weights.head_norms))
            cos, sin, pointers = self.rotary.cos, self.rotary.sin, self.inputs.pointers
            q, hidden = kernels.rope_append(qkv, cos, sin, pointers, layer, shape, weights.head_norms), state.hidden
            if outputs is not None:
                hidden, q = hidden[-outputs:], q[-outputs:]
            return hidden, self.attend(layer, q, qkv)

        return run_layer(weights, kernels, state.normed, attend)


def step_kernels(model: DecoderModel) -> StepKernels:
    """Return the Triton kernels on a GPU, the references elsewhere and in float64."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference
    from ragkv.kernels import triton_decode_step

    return triton_decode_step


def paged_attention(kernels: StepKernels) -> PagedAttention:
    """Return the kernel for blocks that are read in place: the reference beside the other references."""
    if kernels is reference:
        return attend_paged
    from ragkv.kernels import triton_paged_attention

    return triton_paged_attention.attend_paged
