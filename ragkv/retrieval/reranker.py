"""Reranker: a cross-encoder of sentence-transformers that reads a question together with each candidate.

It orders the candidates that vector search and BM25 found, and costs a pass over each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import memory_errors
from ragkv.normalisation import folded
from ragkv.retrieval.pretrained import load_pretrained, split_special_tokens

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

BATCH = 32
LONGEST = 512
"""Tokens of a question and a candidate; what is beyond is not read."""


def make_reranker(source: str) -> Reranker | None:
    """Return the reranker of a setting; None where it is empty. Nothing is loaded yet."""
    return Reranker(source) if source else None


class Reranker:
    """A cross-encoder. Not thread-safe; one thread owns it.

    Attributes:
        source: A folder or a hub id.
    """

    def __init__(self, source: str, device: str = "cpu"):
        """Create a reranker; nothing is loaded yet. device: torch device of the model."""
        self.source, self._device = source, device
        self._model: CrossEncoder | None = None

    def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """Return how well each passage answers the question; only their order means something.

        Raises:
            ModelNotFound: The model cannot be loaded.
            ConfigError: The model is a pickle.
        """
        if not passages:
            return []
        with memory_errors():
            found = self._loaded().predict(
                [(folded(question), folded(passage)) for passage in passages], batch_size=BATCH, show_progress_bar=False
            )
        return [float(score) for score in found]

    def count_tokens(self, question: str, passages: Sequence[str]) -> int:
        """Count the tokens that `scores` reads: those of the question once a passage. Raises as `scores`."""
        if not passages:
            return 0
        tokenizer = self._loaded().tokenizer
        first, second = [folded(question)] * len(passages), list(map(folded, passages))
        pairs = tokenizer(first, second, truncation=True, max_length=LONGEST)
        return sum(map(len, pairs["input_ids"]))

    @property
    def name(self) -> str:
        """The hub id, or the name of the folder."""
        return Path(self.source).name if Path(self.source).is_dir() else self.source

    def load(self) -> None:
        """Load the weights now, so that the first question does not wait. Raises the same errors as `scores`."""
        self._loaded()

    def _loaded(self) -> CrossEncoder:
        if self._model is None:
            self._model = load_pretrained("reranker", self.source, self._open)
        return self._model

    def _open(self, name: str, local: bool) -> CrossEncoder:
        # Imported here because it takes seconds, and commands such as `ragkv ls` do not need it.
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(
            name,
            device=self._device,
            local_files_only=local,
            num_labels=1,
            max_length=LONGEST,
            model_kwargs={"use_safetensors": True},
        )
        split_special_tokens(model.tokenizer)
        return model
