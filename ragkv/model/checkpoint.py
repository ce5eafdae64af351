"""A model's folder: where it is, and what in it decides what the model computes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ragkv.errors import ModelNotFound

_DECIDING = {
    *("config.json", "adapter_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
}
"""Files that decide, beside the weights, what a model computes for a text; not every model has every one."""


def find_folder(source: str) -> Path:
    """The local folder of `source`, fetched from the hub only if it is no path. Raises ModelNotFound."""
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
    except Exception as error:  # the hub client raises a dozen unrelated types for "not there" and "no network"
        raise ModelNotFound(f"model {source!r}: no such folder, and the hub gave {first_line(error)}") from None


def weights_hash_of(folder: Path) -> str:
    """sha256 over everything that decides what the model computes: config, tokenizer, weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name in _DECIDING:
            digest.update(json.dumps([path.name, path.stat().st_size]).encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """Of its message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
