"""The families of models that the tests cover, and what a model's layers mean for an answer, in words.

No code asks for a family: what a layer does is read from it (layer_probe.py). The list is for people. docs/models.md
has the same rows, and `ragkv doctor` names the model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ragkv.model.layer_kinds import LayerKind

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen 2, 2.5",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 MoE",
    "mixtral": "Mixtral",
    "ministral3": "Ministral 3",
    "granite": "Granite",
    "phi3": "Phi 3, 4",
    "phi": "Phi 1.5, 2",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM 3",
    "glm4": "GLM 4",
    "glm4_moe": "GLM 4.5, 4.6 MoE",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
    "cohere": "Cohere Command R",
    "cohere2": "Cohere 2",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4",
    "gpt_oss": "gpt-oss",
    "exaone4": "EXAONE 4",
    "qwen3_next": "Qwen 3 Next",
    "qwen3_5_text": "Qwen 3.5",
    "qwen3_5_moe_text": "Qwen 3.5 MoE",
    "granitemoehybrid": "Granite 4 H",
    "lfm2": "LFM 2",
    "lfm2_moe": "LFM 2 MoE",
    "olmo_hybrid": "OLMo Hybrid",
}
"""Titles by transformers' `model_type`. Tests compare tiny random models of each with transformers' own forward."""
MEASURED = {"llama", "qwen2", "gemma3_text"}
"""Families of which docs/results has measured answers."""


def describe_family(model_type: str) -> str:
    """Say how far a family is proven, in one line."""
    if model_type not in FAMILIES:
        return f"{model_type}: the tests do not cover it; whether stored KV is reused, the self-test decides"
    measured = "answers are measured" if model_type in MEASURED else "answers are not measured"
    return f"{FAMILIES[model_type]}: tested; {measured}"


def describe_layers(kinds: Sequence[LayerKind], wired: bool, states: int = 0, readers: int = 0) -> str:
    """Say what a model's layers mean for an answer, in one line.

    Args:
        kinds: the layers with KV.
        wired: whether ragkv's own code runs them.
        states: how many more layers have a state in place of keys.
        readers: how many more layers read the KV of these.
    """
    words = ["run by ragkv's own code" if wired else "run by their own forward, without recorded graphs and pool"]
    if states:
        words.append(f"{states} of {states + len(kinds)} have a state, and no token is recomputed")
    if readers:
        words.append(f"{readers} more read the KV of {len(kinds)}, densely")
    windows = Counter(kind.window for kind in kinds if kind.window is not None)
    words += [f"{count} of {len(kinds)} see the last {window} tokens" for window, count in windows.items()]
    dense = sum(not kind.plain for kind in kinds)
    if dense:
        where = "no layer" if dense == len(kinds) else f"{len(kinds) - dense} of {len(kinds)} layers"
        words.append(f"sparse policies act in {where}")
    return "; ".join(words)
