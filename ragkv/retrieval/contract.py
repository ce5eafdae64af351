"""What retrieval is made of: interfaces of embedders and rerankers, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import EmbedderIdentity
from ragkv.types import EmbeddedPassages


class TextEmbedder(Protocol):
    """The interface of an embedder. Implementations are thread-safe."""

    @property
    def identity(self) -> EmbedderIdentity:
        """Name and dimension of the model."""
        ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors of passages, [len(texts), dimension] float32."""
        ...

    def encode_queries(self, questions: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors of questions, [len(questions), dimension] float32."""
        ...

    def encode_passages(self, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages:
        """Return unit vectors of passages, each a title and a text, and the segments of the texts."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens these texts have."""
        ...


class PassageRanker(Protocol):
    """The interface of a reranker."""

    source: str

    @property
    def name(self) -> str:
        """How requests name it."""
        ...

    def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """Return a score for each passage; the larger, the better."""
        ...

    def count_tokens(self, question: str, passages: Sequence[str]) -> int:
        """Return how many tokens `scores` reads."""
        ...


@dataclass(frozen=True)
class Retrieval:
    """Parameters of retrieval.

    Attributes:
        rank_constant: The constant k of reciprocal rank fusion. With a larger value the top ranks weigh less.
        candidates: Candidates taken from each ranking, as a multiple of `top_k`.
        flat_limit: Largest number of vectors of a collection for which the search is exact. Measured on one core with
            384 dimensions: 1.4 ms at 10,000 vectors, 11 ms at 100,000, 23 ms at 200,000, which is about the time that
            embedding a question takes. An HNSW graph answers in 1 ms, but building it takes 36 s per 100,000 vectors
            on two cores.
        staleness: Seconds by which a search may miss changes of other processes; 0 compares the views with the
            catalogue at every search.
        own_words: Keep a word index of this machine's own instead of the one in the catalogue.
        vectors: Search vectors in the memory of this process, or in PostgreSQL.
    """

    rank_constant: int = 60
    candidates: int = 4
    flat_limit: int = 200_000
    staleness: float = 0.0
    own_words: bool = False
    vectors: Literal["faiss", "pgvector"] = "faiss"


DEFAULTS = Retrieval()
OpenEarlier = Callable[[EmbedderIdentity], TextEmbedder | None]
"""Opens the embedder of stored vectors; None where that is not possible."""
