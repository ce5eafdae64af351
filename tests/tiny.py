"""Tiny random models of all four architectures, float64: the oracles' laboratory."""

from __future__ import annotations

import torch
import transformers

from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 97


def weights(
    kind: str = "llama",
    *,
    layers: int = 4,
    q_heads: int = 8,
    kv_heads: int = 2,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    max_positions: int = 512,
    head_dim: int = 8,
    hidden_size: int = 64,
    **extra,
):
    """A *ForCausalLM in float64 with weights large enough that attention matters."""
    config_class = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    if kind == "mistral":
        extra.setdefault("sliding_window", None)
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        initializer_range=0.3,
        **extra,
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()


def model(kind: str = "llama", *, profile: Profile | None = None, **options) -> DecoderModel:
    """A DecoderModel over `weights(kind)`; blocks of 4 tokens unless the profile says otherwise."""
    layers = options.get("layers", 4)
    profile = profile or Profile(block=4, initial=1, local=2, stable_layers=tuple(range(layers - 2, layers)))
    return DecoderModel(weights(kind, **options), profile=profile)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())
