"""The cache of converted models: one folder per GGUF file, named by the file's sha256.

A folder appears by a rename when it is complete, so several processes may convert the same file at once: the first one
wins. A folder is used only if it hashes to what its manifest says; a damaged one is made anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from ragkv.errors import ConfigError, ModelNotFound
from ragkv.model.gguf import BYTES_PER_WEIGHT, convert, open_gguf, parameters
from ragkv.model.hashing import file_hash, joined_hash, weights_hash_of

Notify = Callable[[str], None]
"""Receives lines that a user should see."""

FORMAT = 3
"""Version of what `convert` writes; folders of another one are made anew."""
_MANIFEST = "manifest.json"
_ROOM = 64 * 2**20
"""Bytes for tokenizer and config, beside the weights."""
_ABANDONED = 24 * 3600
"""Seconds after which an unfinished folder belongs to a process that was killed."""


@dataclass(frozen=True)
class ConvertedModel:
    """A converted GGUF file.

    Attributes:
        folder: config, tokenizer and weights.
        weights_hash: sha256 over the GGUF file and what was made of it.
    """

    folder: Path
    weights_hash: str


def converted(source: Path, cache: Path, notify: Notify, digest: str = "") -> ConvertedModel:
    """Return the folder that a GGUF file was converted into; convert the file if that did not happen before.

    Args:
        source: the GGUF file.
        cache: folder of all converted models.
        notify: is told about a conversion, which takes from seconds to minutes.
        digest: sha256 of the file, where it is known.

    Raises:
        ModelNotFound: the file is missing or damaged.
        ModelUnsupported: its architecture is not supported.
        ConfigError: the cache folder cannot be written or is full.
    """
    try:
        digest = digest or file_hash(source)
    except OSError as error:
        raise ModelNotFound(f"{source} cannot be read ({error.strerror}); give the path of a .gguf file") from None
    folder = cache / digest
    found = _verified(folder, digest)
    if not found:
        if folder.exists():
            notify(f"{folder} is damaged or outdated; {source.name} is converted again")
        found = _convert_into(folder, source, digest, notify)
    return ConvertedModel(folder, joined_hash(digest, found))


def _verified(folder: Path, digest: str) -> str:
    """Return the hash of a folder that is what its manifest says; "" for a missing, damaged or outdated one."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["gguf"]) != (FORMAT, digest):
            return ""
        if any((folder / name).stat().st_size != size for name, size in manifest["sizes"].items()):
            return ""
        found = weights_hash_of(folder)
        return found if found == manifest["hash"] else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _convert_into(folder: Path, source: Path, digest: str, notify: Notify) -> str:
    """Convert a file; return the hash of the folder."""
    opened, started = open_gguf(source), time.monotonic()
    weights = parameters(opened)
    needed = BYTES_PER_WEIGHT * weights + _ROOM
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        if shutil.disk_usage(folder.parent).free < needed:
            raise OSError(28, "no space left")
        notify(f"converting {source.name}, once: {weights / 1e6:.0f} M weights into {folder.parent}")
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / digest
            made.mkdir()
            convert(source, made, opened)
            _write_manifest(made, digest)
            found = _publish(made, folder, digest)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        room = f"a folder with {needed / 1e6:.0f} MB of room"
        raise ConfigError(f"model cache {folder.parent}: {reason}; set RAGKV_MODEL_CACHE to {room}") from None
    notify(f"converted {source.name} in {time.monotonic() - started:.0f} s")
    return found


def _write_manifest(made: Path, digest: str) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    manifest = {"format": FORMAT, "gguf": digest, "hash": weights_hash_of(made), "sizes": sizes}
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(made: Path, folder: Path, digest: str) -> str:
    """Rename a finished folder to its name, unless another process was quicker; return the hash of what is there.

    A damaged folder gives way. One process at a time looks and renames: else the folder that one has just found damaged
    may be another's new one when it is moved. Raises OSError.
    """
    cache = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(cache, fcntl.LOCK_EX)  # until it is closed, or its process ends
        if found := _verified(folder, digest):
            return found
        if folder.exists():
            folder.rename(Path(tempfile.mkdtemp(prefix="damaged-", dir=made.parent)))
        made.rename(folder)
        if found := _verified(folder, digest):
            return found
    finally:
        os.close(cache)
    raise OSError(f"{folder} cannot be replaced")


def _remove_abandoned(cache: Path) -> None:
    for path in cache.glob(".new-*"):
        if time.time() - path.stat().st_mtime > _ABANDONED:
            shutil.rmtree(path, ignore_errors=True)
