"""Opens models of sentence-transformers: from a folder, from the local cache of hub ids, and only then from the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import ConfigError, ModelNotFound

Loaded = TypeVar("Loaded")

Open = Callable[[str, bool], Loaded]
"""`(name, local) -> model`: opens a folder or a hub id; local: without the network."""


def load_pretrained(what: str, source: str, open: Open[Loaded], only_local: bool = False) -> Loaded:
    """Open a model.

    Args:
        what: `embedder` or `reranker`, for messages.
        source: A folder or a hub id.
        open: Opens it.
        only_local: Never ask the hub.

    Raises:
        ModelNotFound: There is no such model, or it cannot be read.
        ConfigError: Its weights are a pickle.
    """
    folder = Path(source)
    if folder.is_dir():
        _refuse_pickles(what, folder)
        return _opened(what, str(folder), True, open)
    if folder.is_absolute() or source.startswith("."):
        raise ModelNotFound(f"{what}: there is no folder {source}")
    try:
        return _opened(what, source, True, open)
    except ModelNotFound:
        if only_local:
            raise
        return _opened(what, source, False, open)  # A hub id that is not in the local cache.


def _opened(what: str, name: str, local: bool, open: Open[Loaded]) -> Loaded:
    try:
        return open(name, local)
    except (OSError, ValueError, KeyError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelNotFound(f"{what} {name} cannot be loaded: {first_line}") from error


def _refuse_pickles(what: str, folder: Path) -> None:
    for path in sorted(folder.rglob("*.bin")):
        if not path.with_name("model.safetensors").exists():
            raise ConfigError(f"{what}: {path} is a pickle, which can run code; convert it to model.safetensors")


def split_special_tokens(tokenizer: Any) -> None:
    """Let a tokenizer read the special tokens that a text spells, such as `[SEP]`, as text."""
    if hasattr(tokenizer, "split_special_tokens"):  # tokenizers of other libraries have no special tokens
        tokenizer.split_special_tokens = True
