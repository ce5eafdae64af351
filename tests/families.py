"""Tiny random models of the families that people serve, in float32. Made here: no download, no file."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile

VOCABULARY = 97
LAYERS = 4
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = 8
_WINDOWS = {"sliding_window": WINDOW}

_GEMMA4 = {
    **_WINDOWS,
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": VOCABULARY,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS,
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "phi3": {},
    "olmo2": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "ministral3": {},
    "glm4": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
    "starcoder2": {},
    "cohere": {"use_qk_norm": True},
    "gemma": {},
    "phi": {},
    "gemma2": _WINDOWS,
    "gemma3_text": {**_WINDOWS, "num_hidden_layers": 6},
    "gemma4_text": {
        **_WINDOWS,
        "num_hidden_layers": 6,
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 97,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_inputs": {**_GEMMA4, "num_hidden_layers": 6, "global_head_dim": 16},
    "gemma4_small": {
        **_GEMMA4,
        "num_hidden_layers": 8,
        "layer_types": 4 * ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
    },
    "cohere2": _WINDOWS,
    "olmo3": _WINDOWS,
    "gpt_oss": {**_EXPERTS, **_WINDOWS},
    "exaone4": {**_WINDOWS, "sliding_window_pattern": 4},
    "mistral": _WINDOWS,
    "qwen2": {**_WINDOWS, "use_sliding_window": True, "max_window_layers": 2},
}
"""Fields of each family's configuration beside the sizes; `model_type` is that of other forms of a family."""


def weights(name: str, **fields: Any) -> Any:
    """A *ForCausalLM of a family, with weights large enough that attention matters. Equal for equal arguments."""
    found = {**FAMILIES.get(name, {}), **fields}
    config = AutoConfig.for_model(
        found.pop("model_type", name),
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.2,
            **found,
        },
    )
    torch.manual_seed(0)
    # Eager attention is the reference: some versions of transformers choose one that leaves soft caps out.
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in made.parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros, which would hide that they are left out
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return made


@cache
def model(name: str) -> DecoderModel:
    """A DecoderModel over `weights(name)`, made once."""
    profile = Profile(block=4, initial=1, local=2, stable_layers=(LAYERS - 2, LAYERS - 1))
    return DecoderModel(weights(name), profile=profile, name=name)


@cache
def own(name: str) -> Any:
    """Other weights of the same values, which no DecoderModel has touched."""
    return weights(name)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())
