"""Evidence in the chunks of a question set: embedded as ingest embeds them, and kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.engine.evidence import EvidenceFinder, window_scores
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.evidence import BlockEvidence
from ragkv.types import SEGMENT_BYTES, EmbeddedPassages, Hit

TOKEN_BYTES, DIMENSION, WORDS = 4, 384, 8
"""Of random evidence: bytes of a token, numbers of a vector as the packaged embedder's, words of a question."""


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
    return EvidenceFinder(SetSegments(embedder), model.prompt, model.profile.block, model.device)


def packaged_evidence(model: DecoderModel) -> EvidenceFinder:
    """Return the same with the packaged embedder. Raises ModelNotFound: it is not installed."""
    # Imported here because a GPU machine that only computes lacks the libraries of retrieval.
    from ragkv.retrieval import make_embedder

    return set_evidence(model, make_embedder("", str(model.device)))


class RandomEvidence:
    """Evidence in chunks of random tokens: as much work as in a service, and blocks as scattered.

    Words are drawn, not looked for in texts, of which there are none.
    """

    def __init__(self, sizes: Sequence[int], block: int, seed: int, device: torch.device | str):
        """Draw segments.

        Args:
            sizes: Tokens of each chunk.
            block: Tokens of a block.
            seed: Of all that is drawn.
            device: Compares windows with questions.
        """
        self._device = device
        self._random = np.random.default_rng(seed)
        self._bounds, self._segments = list[NDArray[np.float64]](), list[NDArray[np.int8]]()
        for size in sizes:
            ends = TOKEN_BYTES * np.append(np.arange(block, size, block), size).astype(np.float64)
            first, last = np.concatenate([[0.0, 0.0], ends[:-2]])[: len(ends)], np.append(ends[1:], ends[-1:])
            self._bounds.append(np.stack([first, last]))
            shape = (-(-TOKEN_BYTES * size // SEGMENT_BYTES), DIMENSION)
            self._segments.append(self._random.integers(-127, 128, shape, dtype=np.int8))

    def find(self) -> list[BlockEvidence]:
        """Return the evidence of a new random question in every chunk."""
        question = self._random.standard_normal(DIMENSION).astype(np.float32)
        meaning = window_scores(self._segments, self._bounds, question / np.linalg.norm(question), self._device)
        return [
            BlockEvidence(mine, torch.from_numpy(self._random.random((len(mine), WORDS)) < 0.05)) for mine in meaning
        ]
