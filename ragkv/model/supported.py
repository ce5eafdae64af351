"""Which models the layer loop can run: dense Llama, Mistral, Qwen2/2.5 and Qwen3, static RoPE, full attention."""

from __future__ import annotations

from typing import Any

from ragkv.errors import ModelUnsupported

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")


def check_supported(config: Any) -> None:
    """Check that the layer loop can run a model and that its KV can be stored.

    Raises:
        ModelUnsupported: it cannot; the message has one line.
    """
    architecture = (config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")])[0]
    if architecture not in ARCHITECTURES:
        raise ModelUnsupported(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPES:
        raise ModelUnsupported(f"rope type {kind!r} depends on the prompt's length, so stored keys cannot be re-used")
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ModelUnsupported("partial rotary embeddings are not supported")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or getattr(config, "sliding_window", None):
        raise ModelUnsupported(
            "sliding-window attention is not supported; set sliding_window to null if the model allows"
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
