"""A model's layers over caches that are found by address: what a recorded step computes (steps.py, replay.py).

Rows and their places are tensors on the device, and kernels read all else there, so that a graph of it serves other
rows as well. It computes what the plain loop of `DecoderModel.forward` computes, up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ragkv.kernels import decode_step as reference
from ragkv.kernels.decode_step import CachePointers, StepKernels
from ragkv.kernels.rows import raw_queries
from ragkv.model.decoder import DecoderModel, Rotary
from ragkv.model.execution.merged_weights import Layer

Attend = Callable[[int, Tensor], Tensor]
"""(layer, its queries [W, Hq, d]) -> their attention [W, Hq, d]"""


def decode_layers(
    model: DecoderModel,
    layers: Sequence[Layer],
    kernels: StepKernels,
    tokens: Tensor,
    positions: Tensor,
    pointers: CachePointers,
    attend: Attend,
    outputs: int | None = None,
) -> Tensor:
    """Logits [W, vocabulary] of tokens at positions [W], their rows written to places. Nothing in it waits for the
    device, if `attend` does not. outputs: how many of the last rows attend in the last layer, and give logits; None:
    all."""
    x, at, normed = _begin(model, tokens, positions)
    for i, layer in enumerate(layers):
        going = outputs if i == len(layers) - 1 else None
        x, normed = _read(model, i, layer, kernels, x, layer.qkv(normed), at, pointers, attend, going)
    logits: Tensor = model.lm_head(normed)
    return logits


def query_layers(
    model: DecoderModel,
    layers: Sequence[Layer],
    kernels: StepKernels,
    tokens: Tensor,
    positions: Tensor,
    pointers: CachePointers,
    attend: Attend,
) -> list[Tensor]:
    """As `step`, but for the pre-RoPE queries [W, Hq, d] of each of the layers; the last one does nothing else."""
    x, at, normed = _begin(model, tokens, positions)
    found = list[Tensor]()
    for i, layer in enumerate(layers):
        qkv = layer.qkv(normed)
        found.append(raw_queries(qkv, model.shape, layer.heads))
        if i < len(layers) - 1:
            x, normed = _read(model, i, layer, kernels, x, qkv, at, pointers, attend)
    return found


def _begin(model: DecoderModel, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotary, Tensor]:
    x = model.body.embed_tokens(tokens)
    return x, model.rotary(positions), model.body.layers[0].input_layernorm(x)


def _read(
    model: DecoderModel,
    i: int,
    layer: Layer,
    kernels: StepKernels,
    x: Tensor,
    qkv: Tensor,
    at: Rotary,
    pointers: CachePointers,
    attend: Attend,
    going: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The rest of a layer: rows as they leave it, and behind the norm that comes next. going: how many of the last ones
    do, None: all."""
    q = kernels.rope_append(qkv, at.cos, at.sin, pointers, i, model.shape, layer.heads)
    if going is not None:
        x, q = x[-going:], q[-going:]
    x, normed = kernels.add_norm(x, layer.out(attend(i, q).flatten(1)), layer.middle.weight, layer.middle.eps)
    return kernels.add_norm(x, layer.down(kernels.gated(layer.gate_up(normed))), layer.last.weight, layer.last.eps)


def kernels_of(model: DecoderModel) -> StepKernels:
    """The twins on a GPU, the references elsewhere."""
    if model.device.type != "cuda" or model.dtype == torch.float64:
        return reference
    from ragkv.kernels import triton_decode_step

    return triton_decode_step
