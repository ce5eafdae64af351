"""Where models and adapters lie on this machine. It imports nothing heavy, so a command can look before it loads."""

from __future__ import annotations

from pathlib import Path

from ragkv.errors import ConfigError, ModelNotFound

GGUF = ".gguf"
"""Suffix of GGUF files."""
WRAPPER = "wrapper.safetensors"
"""File of wrapper tokens in their folder."""


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
    """Look for a model and its adapters, where they are paths.

    Args:
        model: A folder, a GGUF file or a hub id; "" is the default model.
        adapter: The setting (`read_adapters`).

    Raises:
        ModelNotFound: Nothing is there.
        ConfigError: As `read_adapters`.
    """
    path = Path(model).expanduser()
    if model.lower().endswith(GGUF):
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}; give the path of a .gguf file")
    elif model:
        local_folder(model)
    lora, wrappers = read_adapters(adapter)
    for folder in (*([lora] if lora else []), *(folder for _, folder in wrappers)):
        check_adapter(Path(folder).expanduser())


def read_adapters(setting: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Read the setting `adapter`: folders between commas, `COLLECTION=FOLDER` for wrapper tokens of one collection.

    Returns:
        The LoRA folder, "" for none, and (collection, folder) of each wrapper. A folder without a collection is a
        wrapper for all of them where it holds one.

    Raises:
        ConfigError: two folders are named for the same.
    """
    lora, wrappers = list[str](), dict[str, str]()
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        collection, named, folder = entry.rpartition("=")
        if not named and not (Path(folder).expanduser() / WRAPPER).is_file():
            lora.append(folder)
        elif collection in wrappers:
            raise ConfigError(
                f"adapter {setting!r} names two wrappers for {collection or 'every collection'}; name one"
            )
        else:
            wrappers[collection] = folder
    if len(lora) > 1:
        raise ConfigError(f"adapter {setting!r} names two LoRA folders; name one")
    return "".join(lora), tuple(wrappers.items())


def check_adapter(folder: Path) -> None:
    """Raise ModelNotFound where there is no such folder."""
    if not folder.is_dir():
        raise ModelNotFound(
            f"adapter folder {str(folder)!r} does not exist; give a folder that `ragkv tune` or PEFT wrote"
        )
