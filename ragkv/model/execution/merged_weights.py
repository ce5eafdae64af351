"""Merged weights of a model's layers: q, k and v of a layer are one product, gate and up another.

Weights are moved, not copied: the parameters of the model's modules become views of the merged ones. Merging therefore
needs extra memory for one merged weight only, while it is made, and the model computes the same as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragkv.kernels import fp8_linear
from ragkv.kernels.decode_step import HeadNorms
from ragkv.model.execution.fp8_weights import Fp8Linear

Module = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NormWeights:
    """Weight [size] and eps of an RMS norm."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class MergedLinear:
    """Several linear modules as one product."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the product to x [T, hidden]."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class MergedFp8Linear:
    """Several linear modules in FP8 as one product; see `fp8_weights.Fp8Linear`."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the product to x [T, hidden]."""
        return fp8_linear.linear(x, self.weight, self.scale, self.bias)


@dataclass(frozen=True)
class MergedLayer:
    """Weights of a layer in the order of use. Its first norm belongs to the layer before.

    Attributes:
        qkv_proj: projections of queries, keys and values.
        head_norms: norms of query and key heads, where the model has them.
        o_proj: output projection.
        post_attention_norm: norm before the MLP.
        gate_up_proj: gate and up projections.
        down_proj: down projection.
        next_norm: first norm of the next layer, or the model's last norm. A copy where that is on another device.
    """

    qkv_proj: Module
    head_norms: HeadNorms | None
    o_proj: Module
    post_attention_norm: NormWeights
    gate_up_proj: Module
    down_proj: Module
    next_norm: NormWeights


def supports_merging(body: Any) -> bool:
    """Return whether a model's layers can be merged and run by our kernels.

    They must be on GPUs, have one dtype that Triton computes in, and have plain linear modules with SiLU.
    """
    kinds = {(each.device.type, each.dtype) for each in body.parameters() if each.dtype != fp8_linear.FP8}
    device_type, dtype = next(iter(kinds))
    if len(kinds) > 1 or device_type != "cuda" or dtype == torch.float64 or not find_spec("triton"):
        return False
    return is_plain(body)


def is_plain(body: Any, forms: Sequence[type] = (nn.Linear, Fp8Linear)) -> bool:
    """Return whether all projections are linear modules of one of these forms, and the activation is SiLU."""
    linear = [
        getattr(part, name)
        for block in body.layers
        for part, names in (
            (block.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (block.mlp, ("gate_proj", "up_proj", "down_proj")),
        )
        for name in names
    ]
    kinds = {type(each) for each in linear}
    return kinds in [{form} for form in forms] and bool(body.config.hidden_act == "silu")


def merge_weights(body: Any) -> list[MergedLayer]:
    """Merge the layers of a model for which `is_plain` holds."""
    return merge_layers(body, _merge_linear)


def merge_layers(body: Any, product: Callable[[Sequence[Any]], Module]) -> list[MergedLayer]:
    """Make merged layers; product: makes one product of linear modules with the same input."""
    blocks = list(body.layers)
    next_norms = [*(block.input_layernorm for block in blocks[1:]), body.norm]
    return [_merge_layer(block, norm, product) for block, norm in zip(blocks, next_norms, strict=True)]


def _merge_layer(block: Any, next_norm: Any, product: Callable[[Sequence[Any]], Module]) -> MergedLayer:
    attention, mlp, head_norms = block.self_attn, block.mlp, None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm, attention.k_norm
        head_norms = HeadNorms(_merge([q.weight, k.weight]).view(2, -1), q.variance_epsilon)
    return MergedLayer(
        product([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norms,
        product([attention.o_proj]),
        _norm_weights(block.post_attention_layernorm, mlp.down_proj.weight.device),
        product([mlp.gate_proj, mlp.up_proj]),
        product([mlp.down_proj]),
        _norm_weights(next_norm, mlp.down_proj.weight.device),
    )


def _norm_weights(module: Any, device: torch.device) -> NormWeights:
    return NormWeights(module.weight.detach().to(device), module.variance_epsilon)


def _merge_linear(modules: Sequence[Any]) -> Module:
    """Merge linear modules; either all of them have a bias or none."""
    if len(modules) == 1:
        return cast(Module, modules[0])
    biases = [module.bias for module in modules if module.bias is not None]
    weight, bias = _merge([module.weight for module in modules]), _merge(biases) if biases else None
    if isinstance(modules[0], Fp8Linear):
        return MergedFp8Linear(weight, _merge([module.scale for module in modules]), bias)
    return MergedLinear(weight, bias)


def _merge(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate parameters [rows, …] in one memory. Parameters that are already merged are not moved again."""
    first, sizes = parts[0], [part.shape[0] for part in parts]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    same = {part.untyped_storage().data_ptr() for part in parts} == {first.untyped_storage().data_ptr()}
    if same and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split(sizes), strict=True):
        part.data = rows
    return whole
