"""Embeddings and relevance scores of texts that requests bring along. Neither the catalogue nor the model is needed.

The embedder and the reranker are those of retrieval. They are used for a few texts at a time, so that questions and
searches get their turn in between.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ragkv.errors import Busy, Expired, NoReranker, NotFound
from ragkv.retrieval import Retriever

T = TypeVar("T")

TextWork = Literal["embeddings", "rerank"]
WORKS: tuple[TextWork, ...] = ("embeddings", "rerank")
BATCH = 8
"""Texts that are computed before questions and searches get their turn."""
BATCH_CHARS = 8192
"""Characters of these texts; a longer text comes alone."""
RETRY_SECONDS = 2
"""After so many seconds a request that was refused may come back."""


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the texts of a request.

    Attributes:
        model: Name of the embedder.
        vectors: Unit vectors, [texts, dimension] float32.
        tokens: Tokens of the texts.
    """

    model: str
    vectors: NDArray[np.float32]
    tokens: int


@dataclass(frozen=True)
class Ranked:
    """Scores of the texts of a request.

    Attributes:
        model: Name of the reranker.
        scores: A score for each text, in the order of the request.
        tokens: Tokens that the reranker read.
    """

    model: str
    scores: tuple[float, ...]
    tokens: int


class TextService:
    """Computes in threads, one request at a time. Its coroutines belong to one event loop.

    Attributes:
        texts: Texts that were computed since the start, by the kind of work.
        tokens: Tokens of these texts.
    """

    def __init__(self, retriever: Retriever, capacity: int, seconds: float):
        """Set up the service.

        Args:
            retriever: Its embedder and its reranker are used.
            capacity: Requests that may run and wait.
            seconds: Longest time of a request.
        """
        self._retriever, self._capacity, self._seconds, self._pending = retriever, capacity, seconds, 0
        self._limiter = anyio.CapacityLimiter(1)
        self._lock = threading.Lock()
        self.texts, self.tokens = Counter[TextWork](), Counter[TextWork]()

    @property
    def dimension(self) -> int:
        """Length of the vectors."""
        return self._retriever.embedder.identity.dimension

    async def embed(self, model: str, texts: Sequence[str], queries: bool) -> Embedded:
        """Embed texts.

        Args:
            model: The embedder that the request names.
            texts: What to embed; not empty.
            queries: Whether they are questions. Some models embed these otherwise than passages.

        Raises:
            Busy: Too many requests wait.
            Expired: The texts could not be embedded in time.
            NotFound: The service has another embedder.
        """
        name = self._retriever.embedder.identity.name
        if model != name:
            raise NotFound(f"there is no such embedding model; use {name!r}")
        return await self._run(lambda end: self._embedded(name, texts, queries, end))

    async def rank(self, model: str, query: str, texts: Sequence[str]) -> Ranked:
        """Score texts by how well they answer a query.

        Args:
            model: The reranker that the request names; "" for whichever the service has.
            query: The query.
            texts: What to score; not empty.

        Raises:
            Busy: Too many requests wait.
            Expired: The texts could not be scored in time.
            NoReranker: The service has no reranker.
            NotFound: The service has another reranker.
        """
        reranker = self._retriever.reranker
        if reranker is None:
            raise NoReranker
        if model not in ("", reranker.name):
            raise NotFound(f"there is no such reranker; use {reranker.name!r}")
        return await self._run(lambda end: self._ranked(query, texts, end))

    async def _run(self, work: Callable[[float], T]) -> T:
        if self._pending >= self._capacity:
            raise Busy(self._pending, RETRY_SECONDS)
        self._pending += 1
        end = time.monotonic() + self._seconds
        try:
            return await anyio.to_thread.run_sync(work, end, limiter=self._limiter)
        finally:
            self._pending -= 1

    def _embedded(self, name: str, texts: Sequence[str], queries: bool, end: float) -> Embedded:
        parts, tokens = list[NDArray[np.float32]](), 0
        for batch in _batches(texts, end):
            vectors, count = self._retriever.embed(batch, queries)
            parts.append(vectors)
            tokens += count
        self._count("embeddings", len(texts), tokens)
        return Embedded(name, np.concatenate(parts), tokens)

    def _ranked(self, query: str, texts: Sequence[str], end: float) -> Ranked:
        scores, tokens = list[float](), 0
        for batch in _batches(texts, end):
            found, count = self._retriever.rank(query, batch)
            scores += found
            tokens += count
        self._count("rerank", len(texts), tokens)
        reranker = self._retriever.reranker
        return Ranked(reranker.name if reranker else "", tuple(scores), tokens)

    def _count(self, work: TextWork, texts: int, tokens: int) -> None:
        with self._lock:
            self.texts[work] += texts
            self.tokens[work] += tokens


def _batches(texts: Sequence[str], end: float) -> Iterator[Sequence[str]]:
    """Yield some of the texts at a time, in order. Raises Expired when the time is over."""
    batch, chars = list[str](), 0
    for text in texts:
        if batch and (len(batch) == BATCH or chars + len(text) > BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        if time.monotonic() >= end:
            raise Expired
        batch.append(text)
        chars += len(text)
    yield batch
