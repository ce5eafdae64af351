"""Evidence in the chunks of a question set: embedded as ingest embeds them, and kept in memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.engine.evidence import EvidenceFinder, window_vectors
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.evidence import BlockEvidence
from ragkv.types import SEGMENT_BYTES, EmbeddedPassages, Hit

TOKEN_BYTES, DIMENSION, WORDS, TITLE_WORDS = 4, 384, 8, 3
"""Of random evidence: bytes of a token, numbers of a vector as the packaged one, words of a question and of a title."""


class SetEmbedder(Protocol):
    """The part of an embedder that question sets need."""

    def encode_queries(self, questions: Sequence[str]) -> NDArray[np.float32]: ...

    def encode_passages(self, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages: ...


class SetSegments:
    """Segments and questions that were embedded once; a `SegmentFinder`."""

    def __init__(self, embedder: SetEmbedder):
        self._embedder = embedder
        self._segments: dict[tuple[str, str], NDArray[np.int8]] = {}
        self._questions: dict[str, NDArray[np.float32]] = {}

    @property
    def identity(self) -> Hashable:
        """One embedder makes all of them."""
        return None

    def question_vector(self, question: str) -> NDArray[np.float32]:
        """Return the unit vector of a question [dimension]."""
        if question not in self._questions:
            self._questions[question] = self._embedder.encode_queries([question])[0]
        return self._questions[question]

    def segments(self, hits: Sequence[Hit]) -> list[NDArray[np.int8]]:
        """Return the segments of the chunk of each hit."""
        passages = [(hit.chunk.title, hit.chunk.text) for hit in hits]
        missing = [passage for passage in dict.fromkeys(passages) if passage not in self._segments]
        if missing:
            self._segments.update(zip(missing, self._embedder.encode_passages(missing).segments, strict=True))
        return [self._segments[passage] for passage in passages]


def set_evidence(model: DecoderModel, embedder: SetEmbedder) -> EvidenceFinder:
    """Return what finds evidence in the chunks of question sets, as the service finds it in retrieved ones."""
    return EvidenceFinder(SetSegments(embedder), model.prompt, model.profile.block)


def packaged_evidence(model: DecoderModel) -> EvidenceFinder:
    """Return the same with the packaged embedder. Raises ModelNotFound: it is not installed."""
    # Imported here because a GPU machine that only computes lacks the libraries of retrieval.
    from ragkv.retrieval import make_embedder

    return set_evidence(model, make_embedder("", str(model.device)))


class RandomEvidence:
    """Evidence in chunks of random tokens: as much work as in a service that knows them, and blocks as scattered.

    Words are drawn, not looked for in texts, of which there are none.
    """

    def __init__(self, sizes: Sequence[int], block: int, seed: int):
        """Draw segments.

        Args:
            sizes: Tokens of each chunk.
            block: Tokens of a block.
            seed: Of all that is drawn.
        """
        self._random = np.random.default_rng(seed)
        self._vectors = list[Tensor]()
        for size in sizes:
            ends = TOKEN_BYTES * np.append(np.arange(block, size, block), size).astype(np.float64)
            first, last = np.concatenate([[0.0, 0.0], ends[:-2]])[: len(ends)], np.append(ends[1:], ends[-1:])
            shape = (-(-TOKEN_BYTES * size // SEGMENT_BYTES), DIMENSION)
            segments = self._random.integers(-127, 128, shape, dtype=np.int8)
            self._vectors.append(window_vectors(segments, np.stack([first, last])))

    def find(self) -> list[BlockEvidence]:
        """Return the evidence of a new random question in every chunk."""
        vector = self._random.standard_normal(DIMENSION).astype(np.float32)
        question = torch.from_numpy(vector / np.linalg.norm(vector))
        return [BlockEvidence(mine @ question, *self._words(i, len(mine))) for i, mine in enumerate(self._vectors)]

    def _words(self, number: int, windows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw which words stand in the windows of a chunk. Its own words are those of its title."""
        count = TITLE_WORDS * len(self._vectors)
        words, named = (self._random.random((windows, some)) < 0.05 for some in (WORDS, count))
        title = torch.arange(count) // TITLE_WORDS == number
        return torch.from_numpy(words), torch.from_numpy(named), title
