"""The text part of a checkpoint that reads images, too. Many models are published in such a class only."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ragkv.errors import ModelUnsupported


def text_config(config: Any) -> Any:
    """Return the configuration of a model's text part; for a model of text alone its own."""
    return config.get_text_config(decoder=True)


def loader_of(config: Any) -> Any:
    """Return the class of transformers that loads a model: that of causal language models where it loads one."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    whole = text_config(config) is not config and not name.endswith("ForCausalLM")
    return transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM


def text_part(weights: Any) -> Any:
    """Return the *ForCausalLM inside a loaded model, with its parameters. What reads images is left to be freed.

    Raises:
        ModelUnsupported: the model has no such part.
    """
    body: Any = getattr(weights, "model", None)
    if text_config(weights.config) is weights.config or not hasattr(body, "language_model"):
        return weights
    with torch.device("meta"):
        causal = transformers.AutoModelForCausalLM.from_config(body.language_model.config)
    causal.model, causal.lm_head = body.language_model, weights.lm_head
    causal.generation_config = weights.generation_config
    if any(each.is_meta for each in (*causal.parameters(), *causal.buffers())):
        raise ModelUnsupported(f"the text part of {type(weights).__name__} is not all of a {type(causal).__name__}")
    return causal
