"""Vectors of questions, by the embedder that made the vectors they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import EmbedderIdentity
from ragkv.retrieval.contract import OpenEarlier, TextEmbedder

MOST_KEPT = 64
"""Vectors of questions that are kept: until these are searched for, and until their evidence is looked for."""


class QuestionVectors:
    """Embeds questions and keeps their vectors for a while. Not thread-safe: the retriever's lock guards it."""

    def __init__(self, open_earlier: OpenEarlier):
        """Start without vectors. open_earlier: opens the embedder of vectors that come from another one."""
        self._open_earlier = open_earlier
        self._earlier: dict[EmbedderIdentity, TextEmbedder | None] = {}
        self._vectors: dict[tuple[EmbedderIdentity, str], NDArray[np.float32]] = {}

    def __len__(self) -> int:
        return len(self._vectors)

    def embedder_of(self, identity: EmbedderIdentity, present: TextEmbedder) -> TextEmbedder | None:
        """Return the embedder that made some vectors, `present` or an earlier one; None if it cannot be opened."""
        if identity == present.identity:
            return present
        if identity not in self._earlier:
            self._earlier[identity] = self._open_earlier(identity)
        return self._earlier[identity]

    def drop_earlier(self) -> None:
        """Forget earlier embedders."""
        self._earlier.clear()

    def vector(self, embedder: TextEmbedder, question: str) -> NDArray[np.float32]:
        """Embed a question, if it is not embedded already. Returns [dimension]."""
        name = (embedder.identity, question)
        if name not in self._vectors:
            self._embed(embedder, [question])
        return self._vectors[name]

    def embed_ahead(self, embedder: TextEmbedder, questions: Sequence[str]) -> None:
        """Embed questions together, unless the first of them is embedded already or stands alone."""
        identity = embedder.identity
        missing = [question for question in dict.fromkeys(questions) if (identity, question) not in self._vectors]
        if len(missing) > 1 and missing[0] == questions[0]:
            self._embed(embedder, missing)

    def _embed(self, embedder: TextEmbedder, questions: Sequence[str]) -> None:
        """Embed questions and keep their vectors, in place of the oldest."""
        while len(self._vectors) > MOST_KEPT:
            del self._vectors[next(iter(self._vectors))]
        names = [(embedder.identity, question) for question in questions]
        self._vectors.update(zip(names, embedder.encode_queries(questions), strict=True))
