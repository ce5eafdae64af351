"""Hashes of model files: they are part of the fingerprint, so KV of one model is never read with another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_HASHED_FILES = {
    *("config.json", "adapter_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
}
"""Files besides the weights that determine what a model computes for a text. No model has all of them."""


def file_hash(path: Path) -> str:
    """Return the sha256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def joined_hash(*parts: str) -> str:
    """Return the sha256 of several hashes; another order is another hash."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
