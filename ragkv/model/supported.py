"""Which models can be run: causal decoders whose keys can be moved to other positions.

Here stands what a configuration tells before any weight is read. What the layers do is read from them
(layer_probe.py). Layers made as those of the four architectures in `WIRED` are run by our own code, all others by
theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ragkv.errors import ModelUnsupported

WIRED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers `WiredLayer` and the GPU's fused loops run, with full attention and whole heads that
turn."""
ROPES = ("default", "linear", "llama3", "yarn", "proportional")
FULL, WINDOW = "full_attention", "sliding_attention"
STATES = ("linear_attention", "conv", "mamba")
"""Types of layers that have a state instead of keys (recurrence.py)."""


def check_supported(config: Any) -> None:
    """Check that a model can be run layer by layer and its KV stored, as far as its configuration tells.

    Raises:
        ModelUnsupported: it cannot; the message has one line.
    """
    architecture = architecture_of(config)
    if getattr(config, "model_type", "") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelUnsupported(f"architecture {architecture} is not supported: it is no causal language model")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"architecture {architecture} is not supported: it has an encoder")
    if not getattr(config, "rope_parameters", None):
        raise ModelUnsupported(f"architecture {architecture} is not supported: it has no rotary embeddings")
    if getattr(config, "kv_lora_rank", None):
        raise ModelUnsupported(f"architecture {architecture} is not supported: its KV is latent (MLA)")
    if getattr(config, "altup_num_inputs", 0):
        raise ModelUnsupported(f"architecture {architecture} is not supported: its layers have several streams of rows")
    if getattr(config, "attention_chunk_size", None):
        raise ModelUnsupported(f"architecture {architecture} is not supported: it attends within chunks of the input")
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if kind not in ROPES:
            raise ModelUnsupported(
                f"rope type {kind!r} depends on the prompt's length, so stored keys cannot be re-used"
            )
    others = sorted({*(getattr(config, "layer_types", None) or [])} - {FULL, WINDOW, *STATES})
    if others:
        raise ModelUnsupported(f"layers of the type {' and '.join(others)} are not supported")


def attention_layers(config: Any) -> int:
    """Return how many layers of a configuration have KV of their own. Only these count."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    shared: int = getattr(config, "num_kv_shared_layers", 0)
    return sum(kind not in STATES for kind in kinds) - shared


def has_states(config: Any) -> bool:
    """Return whether layers of a configuration have a state in place of keys."""
    return any(kind in STATES for kind in getattr(config, "layer_types", None) or ())


def is_wired(config: Any) -> bool:
    """Return whether a model's layers are made as Llama's, with full attention and heads that turn as a whole."""
    return (
        architecture_of(config) in WIRED
        and not getattr(config, "sliding_window", None)
        and {*(getattr(config, "layer_types", None) or [FULL])} == {FULL}
        and all(rope.get("partial_rotary_factor", 1.0) in (None, 1.0) for rope in _ropes(config))
    )


def architecture_of(config: Any) -> str:
    """Return the name of a model's architecture."""
    return str((config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")])[0])


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotations of a configuration: one, or one for each type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)]
    yield from kinds or [rope]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
