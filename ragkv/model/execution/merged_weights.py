"""A model's layers as a few large products: q, k and v of a layer are one, gate and up another.

The weights that are joined are moved, not copied: the model's modules become views of the joined ones, so this costs no
memory but that of one joined weight while it is made, and the model computes what it computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragkv.kernels.decode_step import HeadNorms

Module = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Norm:
    """An RMS norm. weight [size]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Product:
    """Rows of several linear modules as one product."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """What a layer computes, in order; its first norm belongs to what comes before. heads: norms of queries and keys,
    None: there are none · last: the norm behind the layer, the next one's first or the model's own; a copy where that
    is on another device."""

    qkv: Product
    heads: HeadNorms | None
    out: Module
    middle: Norm
    gate_up: Product
    down: Module
    last: Norm


def supports_merging(body: Any) -> bool:
    """Whether a model's layers can be joined and run by kernels of our own: on GPUs, of one dtype that Triton
    computes in, plain linear modules with SiLU between them."""
    kinds = {(each.device.type, each.dtype) for each in body.parameters()}
    place, dtype = next(iter(kinds))
    if len(kinds) > 1 or place != "cuda" or dtype == torch.float64 or not find_spec("triton"):
        return False
    return is_plain(body)


def is_plain(body: Any) -> bool:
    """Whether all products are those of unquantised linear modules, with SiLU between them."""
    linear = [
        getattr(part, name)
        for block in body.layers
        for part, names in (
            (block.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (block.mlp, ("gate_proj", "up_proj", "down_proj")),
        )
        for name in names
    ]
    return all(type(each) is nn.Linear for each in linear) and body.config.hidden_act == "silu"


def merge_weights(body: Any) -> list[Layer]:
    """The layers of a model that `is_plain`."""
    blocks = list(body.layers)
    behind = [*(block.input_layernorm for block in blocks[1:]), body.norm]
    return [_layer(block, norm) for block, norm in zip(blocks, behind, strict=True)]


def _layer(block: Any, behind: Any) -> Layer:
    attention, mlp, heads = block.self_attn, block.mlp, None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm, attention.k_norm
        heads = HeadNorms(_joined([q.weight, k.weight]).view(2, -1), q.variance_epsilon)
    return Layer(
        _product([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads,
        attention.o_proj,
        _norm(block.post_attention_layernorm, mlp.down_proj.weight.device),
        _product([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj,
        _norm(behind, mlp.down_proj.weight.device),
    )


def _norm(module: Any, device: torch.device) -> Norm:
    return Norm(module.weight.detach().to(device), module.variance_epsilon)


def _product(modules: Sequence[Any]) -> Product:
    """One product of the modules' rows; all of them have a bias, or none."""
    biases = [module.bias for module in modules if module.bias is not None]
    return Product(_joined([module.weight for module in modules]), _joined(biases) if biases else None)


def _joined(parts: Sequence[nn.Parameter]) -> Tensor:
    """The parts [rows, …] one behind the other, the same memory: what was joined before is not moved again."""
    first, sizes = parts[0], [part.shape[0] for part in parts]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    same = {part.untyped_storage().data_ptr() for part in parts} == {first.untyped_storage().data_ptr()}
    if same and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split(sizes), strict=True):
        part.data = rows
    return whole
