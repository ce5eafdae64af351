"""Tiny random models of families that put layers with a state between layers with attention, in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile
from tests import families

_DELTA = {
    "initializer_range": 0.1,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
}

_CONVOLUTIONS = {
    "num_hidden_layers": 6,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"],
}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "granitemoehybrid": {**_MAMBA, "position_embedding_type": "nope"},
    "lfm2": _CONVOLUTIONS,
}
"""Fields of each family's configuration beside the sizes."""

RELATED: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "granitemoehybrid": {**_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    "lfm2_moe": {**_EXPERTS, **_CONVOLUTIONS, "num_dense_layers": 1},
    "olmo_hybrid": {},
}
"""Families and forms of them that need nothing else. Fields likewise."""


@cache
def model(name: str) -> DecoderModel:
    """A DecoderModel of a family, made once."""
    return DecoderModel(own.__wrapped__(name), profile=Profile(block=4, initial=1, local=2, stable_layers=(0, 1)))


@cache
def own(name: str) -> Any:
    """Weights of the same values, which no DecoderModel has touched."""
    return families.weights(name, **HYBRIDS[name])
