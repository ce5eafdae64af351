"""Model checkpoints: find a folder, check that the model is supported, load it and hash what it computes with.

Supported are dense decoders of the Llama, Mistral, Qwen2/2.5 and Qwen3 families with static RoPE and full attention.
This module and `bench/shapes.py`, which makes random weights, are the only importers of transformers' models.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.model.placement import SPREAD, check_spreadable, remove_hooks
from ragkv.model.profile import Profile, default_profile, load_profile

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

_HASHED_FILES = {
    *("config.json", "adapter_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
}
"""Files besides the weights that determine what a model computes for a text. No model has all of them."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model in memory.

    Attributes:
        weights: a *ForCausalLM in eval mode.
        tokenizer: its tokenizer.
        profile: its profile.
        name: the last part of its source.
        weights_hash: sha256 over config, tokenizer and weight files.
    """

    weights: Any
    tokenizer: Any
    profile: Profile
    name: str
    weights_hash: str


def load_checkpoint(source: str, device: str, dtype: str, profiles: Path | None) -> LoadedCheckpoint:
    """Load a local folder or, when `source` is no folder, a hub id.

    Args:
        source: folder or hub id.
        device: a torch device, `auto` (a GPU where there is one) or `spread` (over all GPUs).
        dtype: a name in `DTYPES` or `auto` (see `auto_dtype`).
        profiles: folder where `ragkv calibrate` keeps profiles of models that have none beside their weights.

    Raises:
        ModelNotFound: there is no such model, or it cannot be loaded.
        ModelUnsupported: the architecture, the dtype or the placement is not supported.
        ConfigError: the profile is damaged, or the model cannot be spread over GPUs.
    """
    folder = find_folder(source)
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"model {source!r}: no readable config.json ({first_line(error)})") from None
    check_supported(config)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == SPREAD:
        check_spreadable()
    if dtype == "auto":
        dtype = auto_dtype(device)
    try:
        weights, tokenizer = _read_folder(folder, device, DTYPES[dtype])
    except KeyError:
        raise ModelUnsupported(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(f"model {source!r}: cannot be loaded ({first_line(error)})") from None
    weights_hash = weights_hash_of(folder)
    profile = default_profile(config.num_hidden_layers, config.hidden_size, config.model_type)
    for path in [folder / "profile.json", *([profiles / f"{weights_hash}.json"] if profiles else [])]:
        if path.is_file():
            profile = load_profile(path, profile)
    return LoadedCheckpoint(weights, tokenizer, profile, Path(source).name, weights_hash)


def auto_dtype(device: str) -> str:
    """Return the dtype of weights and KV where none is set.

    It is bfloat16 on a GPU and on CPUs that multiply in bfloat16, which is several times faster there, and float32 on
    other CPUs.
    """
    if torch.device("cuda" if device == SPREAD else device).type != "cpu":
        return "bfloat16"
    can = torch.cpu.get_capabilities()
    return "bfloat16" if can.get("avx512_bf16") or can.get("amx_bf16") else "float32"


def _read_folder(folder: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return (weights in eval mode on the device, tokenizer)."""
    placement = "balanced" if device == SPREAD else None
    weights: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, device_map=placement
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return (remove_hooks(weights) if device == SPREAD else weights.to(device)).eval(), tokenizer


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


def find_folder(source: str) -> Path:
    """Return the local folder of `source`, downloaded from the hub only if `source` is no path.

    Raises:
        ModelNotFound: there is no such folder, or the hub has no such model.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelNotFound(f"model folder {source!r} does not exist; give a folder or a hub id like org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        )
    except Exception as error:  # the hub client raises many unrelated types for a missing model and for no network
        raise ModelNotFound(f"model {source!r}: no such folder, and the hub gave {first_line(error)}") from None


def weights_hash_of(folder: Path) -> str:
    """Return the sha256 over everything that determines what the model computes: config, tokenizer and weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name in _HASHED_FILES:
            digest.update(json.dumps([path.name, path.stat().st_size]).encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
