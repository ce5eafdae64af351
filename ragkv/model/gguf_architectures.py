"""Architectures of GGUF files that are converted: what their tensors are called, and how llama.cpp changed them.

The names are those of llama.cpp's own converter, which the package gguf has as a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GgufArchitecture:
    """What llama.cpp's converter does to an architecture.

    Attributes:
        model: the class of transformers.
        pairs: q and k rows that RoPE rotates together lie side by side.
        above_one: norms are stored as what they multiply by, one more than the model's own weights.
        experts: it may have experts.
        scaled: kinds of RoPE scaling that the metadata tell in full.
    """

    model: str
    pairs: bool = False
    above_one: bool = False
    experts: bool = False
    scaled: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", pairs=True),
    "mistral": GgufArchitecture("MistralForCausalLM", pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", experts=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", above_one=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", above_one=True, scaled=("linear",)),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM"),
    "phi3": GgufArchitecture("Phi3ForCausalLM"),
    "stablelm": GgufArchitecture("StableLmForCausalLM"),
    "starcoder2": GgufArchitecture("Starcoder2ForCausalLM"),
}
_GATE_UP = "gate_up_proj"
"""transformers holds the first two matrices of all experts as one, llama.cpp as two."""


def own_names(expected: Iterable[str], architecture: str, layers: int) -> dict[str, str]:
    """Return what transformers calls each tensor of a file.

    Args:
        expected: the names of the weights of transformers' model.
        architecture: one of `ARCHITECTURES`.
        layers: layers of the model.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(known.get(architecture, MODEL_ARCH.LLAMA), layers)
    names: dict[str, str] = {}
    for name in expected:
        whole = [name.replace(_GATE_UP, half) for half in ("gate_proj", "up_proj")] if _fused(name) else [name]
        for part in whole:
            stem, _, suffix = part.rpartition(".")
            if found := table.get_name(stem):
                names[f"{found}.{suffix}"] = part
            elif found := table.get_name(part):
                names[f"{found}.weight"] = part
    return names


def _fused(name: str) -> bool:
    return name.endswith(f".experts.{_GATE_UP}")


def join_experts(tensors: dict[str, Tensor], expected: Iterable[str]) -> None:
    """Make one matrix of the first two of all experts, where the model has it as one."""
    for name in expected:
        gate, up = (name.replace(_GATE_UP, part) for part in ("gate_proj", "up_proj"))
        if _fused(name) and gate in tensors and up in tensors:
            tensors[name] = torch.cat([tensors.pop(gate), tensors.pop(up)], 1)


def restored(weights: Tensor, name: str, stored: str, architecture: str, config: Any) -> Tensor:
    """Return a tensor as transformers has it.

    Args:
        weights: as the file has it, dequantised.
        name: what transformers calls it.
        stored: what the file calls it.
        architecture: one of `ARCHITECTURES`.
        config: the configuration of the model.
    """
    kind, part = ARCHITECTURES[architecture], stored.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if kind.pairs and part in heads:
        return unpermute(weights, heads[part])
    if kind.above_one and part.endswith("norm"):
        return weights - 1
    if name.endswith(".conv.conv.weight"):  # a channel has one filter, which llama.cpp does not count as a dimension
        return weights[:, None]
    return weights


def unpermute(weights: Tensor, heads: int) -> Tensor:
    """Return q or k rows in the order of transformers.

    Args:
        weights: [heads * d, in] or [heads * d]. Rows 2i and 2i + 1 of a head are rotated together; transformers rotates
            rows i and i + d/2.
        heads: query heads of q, kv heads of k.
    """
    halves = weights.reshape(heads, -1, 2, *weights.shape[1:])
    return halves.transpose(1, 2).reshape(weights.shape)
