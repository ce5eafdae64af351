"""LoRA adapters in PEFT's format: read a folder, check that it is plain LoRA, merge it into a model's weights.

The merge is W + scale · B A in float32, rounded once to the model's dtype. PEFT merges in the dtype of the model. What
PEFT would compute in another way is refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.model.hashing import file_hash, joined_hash
from ragkv.model.locations import check_adapter
from ragkv.model.supported import first_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "ragkv_base"
"""Metadata of the weights' file: hash of the model that the adapter was trained on."""

_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Values that leave the merge as it is. Other ways to start the training change the base model's weights, too."""
_IGNORED = {
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "inference_mode", "lora_dropout", "auto_mapping", "base_model_name_or_path", "revision"),
    *("peft_version", "runtime_config", "megatron_config", "megatron_core", "eva_config", "qalora_group_size"),
}
"""Fields that are read elsewhere, matter to training only, or follow from the names of the tensors."""
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(?:default\.)?weight")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in memory.

    Attributes:
        folder: where it comes from.
        scale: factor of B A.
        pairs: A [r, in] and B [out, r] by the name of the module that they change.
        digest: sha256 over its files.
        base: hash of the weights that it was trained on; "" where the file does not say.
    """

    folder: Path
    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    digest: str
    base: str = ""


def read_adapter(folder: Path) -> Adapter:
    """Read a LoRA folder in PEFT's format.

    Raises:
        ModelNotFound: a file is missing or damaged.
        ModelUnsupported: it is no plain LoRA adapter.
    """
    check_adapter(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelNotFound(f"adapter {folder} has no {name}; save it with PEFT's save_pretrained (safetensors)")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        tensors = load_file(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, "pt") as file:
            base = (file.metadata() or {}).get(BASE, "")
        digest = joined_hash(file_hash(folder / CONFIG), file_hash(folder / WEIGHTS))
    except KeyError as error:
        raise ModelUnsupported(f"adapter {folder}: {CONFIG} has no {error}; only LoRA adapters can be merged") from None
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelNotFound(f"adapter {folder} is damaged ({first_line(error)}); copy or save it again") from None
    _check_plain(folder, config)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(folder, scale, _pairs(folder, tensors, rank), digest, base)


def merge(weights: Any, adapter: Adapter, dtype: torch.dtype) -> None:
    """Merge an adapter into a model, and cast the model's parameters to a dtype.

    Args:
        weights: a *ForCausalLM in the dtype of its file; it is changed in place.
        adapter: the adapter.
        dtype: dtype of all parameters afterwards.

    Raises:
        ModelUnsupported: the adapter belongs to a model of another shape.
    """
    modules = dict(weights.named_modules())
    for name, (a, b) in adapter.pairs.items():
        module = modules.get(name)
        if not isinstance(module, nn.Linear) or ".layers." not in name:
            raise ModelUnsupported(f"adapter {adapter.folder} changes {name}, which is no projection of this model")
        if (b.shape[0], a.shape[1]) != tuple(module.weight.shape):
            raise ModelUnsupported(
                f"adapter {adapter.folder}: {name} is {b.shape[0]} x {a.shape[1]} there and "
                f"{' x '.join(map(str, module.weight.shape))} in the model; use the model that it was trained on"
            )
        change = adapter.scale * (b.float() @ a.float())
        merged = module.weight.detach().float() + change.to(module.weight.device)
        module.weight = nn.Parameter(merged.to(dtype), requires_grad=False)
    for parameter in weights.parameters():
        parameter.data = parameter.data.to(dtype)


def _check_plain(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelUnsupported for whatever is set beside plain LoRA: DoRA, biases, ranks of single modules, …"""
    for field, value in config.items():
        if field in _PLAIN and value not in _PLAIN[field]:
            raise ModelUnsupported(f"adapter {folder}: {field} {value!r} is not supported; only plain LoRA is")
        if field not in _PLAIN and field not in _IGNORED and value:
            raise ModelUnsupported(f"adapter {folder}: {field} is set and not supported; only plain LoRA is")


def _pairs(folder: Path, tensors: dict[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by module; raise ModelUnsupported where one is missing, unknown, not finite or of another rank."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if not match:
            raise ModelUnsupported(f"adapter {folder}: tensor {name} is not supported; only plain LoRA is")
        if tensor.dim() != 2 or tensor.shape["AB".index(match[2])] != rank:
            raise ModelUnsupported(f"adapter {folder}: {name} has shape {tuple(tensor.shape)}, not rank {rank}")
        if not tensor.isfinite().all():
            raise ModelUnsupported(f"adapter {folder}: {name} has numbers that are not finite; train it again")
        found.setdefault(match[1], {})[match[2]] = tensor
    lone = [name for name, pair in found.items() if len(pair) != 2]
    if lone or not found:
        where = lone[0] if lone else "every module"
        raise ModelUnsupported(f"adapter {folder} lacks A or B of {where}; copy or save it again")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}
