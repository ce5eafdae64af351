"""Shapes of published models whose layers run by their own forward, with random weights as transformers draws them.

Unlike those of shapes.py they are not sparse by construction, so the attention of a row is spread over all keys.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel

OWN_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 131072,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
    },
}


def own_random_model(name: str, device: str | torch.device, dtype: torch.dtype | None, seed: int) -> DecoderModel:
    """Make a model of `OWN_SHAPES` without a tokenizer.

    Args:
        name: its name.
        device: the device.
        dtype: default bfloat16 on CUDA, else float32.
        seed: seed of the weights.

    Raises:
        InputError: the model does not run on several devices.
    """
    if str(device) == "spread":
        raise InputError(f"shape {name!r} runs on one device")
    where, sizes = torch.device(device), dict(OWN_SHAPES[name])
    if dtype is None:
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with where:
        weights = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return DecoderModel(weights.eval().requires_grad_(False), name=name)
