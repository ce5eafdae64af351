"""Where models and adapters lie on this machine. It imports nothing heavy, so a command can look before it loads."""

from __future__ import annotations

from pathlib import Path

from ragkv.errors import ModelNotFound

GGUF = ".gguf"
"""Suffix of GGUF files."""


def local_folder(source: str) -> Path | None:
    """Return the folder of a model; None where it is to be found on the hub.

    Args:
        source: A folder or a hub id.

    Raises:
        ModelNotFound: It is a path, and there is no such folder.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelNotFound(
            f"model folder {source!r} does not exist; give a folder, a .gguf file or a hub id like org/name"
        )
    return None


def check_locations(model: str, adapter: str) -> None:
    """Raise ModelNotFound where a model or an adapter is a path, and nothing is there.

    Args:
        model: A folder, a GGUF file or a hub id; "" is the default model.
        adapter: A folder; "" for none.
    """
    path = Path(model).expanduser()
    if model.lower().endswith(GGUF):
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}; give the path of a .gguf file")
    elif model:
        local_folder(model)
    if adapter:
        check_adapter(Path(adapter).expanduser())


def check_adapter(folder: Path) -> None:
    """Raise ModelNotFound where there is no such folder."""
    if not folder.is_dir():
        raise ModelNotFound(f"adapter folder {str(folder)!r} does not exist; give a folder in PEFT's format")
