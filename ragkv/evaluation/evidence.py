"""Evidence in the chunks of a question set: embedded as ingest embeds them, and kept in memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragkv.engine.evidence import EvidenceFinder
from ragkv.model.decoder import DecoderModel
from ragkv.types import EmbeddedPassages, Hit


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
