"""What the KV of documents takes in the store, and what it saves of a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.catalog import CollectionInfo, DocumentInfo
from ragkv.engine.engine import Engine

QUESTION_TOKENS = 32
"""Tokens of a usual question with its part of the prompt."""


@dataclass(frozen=True)
class KVSizes:
    """Bytes of a document's KV.

    Attributes:
        computed: As the model computes it.
        stored: As the store keeps it, without head records; 0 if the model may not reuse stored KV.
    """

    computed: int
    stored: int


class KVEstimates:
    """Sizes of KV by the catalogue, and times by the costs measured here. Thread-safe.

    Attributes:
        token_bytes: Bytes of KV of one token, as the model computes it.
    """

    def __init__(self, engine: Engine):
        self.token_bytes = engine.model.token_bytes
        self._catalog, self._body_bytes, self._costs = engine.catalog, engine.body_bytes, engine.costs
        self._top_k, self._reuses = engine.settings.top_k, not engine.reuse_refused

    def documents(self, infos: Sequence[DocumentInfo]) -> list[KVSizes]:
        """Return the bytes of the KV of these documents of one collection."""
        counts = self._catalog.token_counts(infos[0].collection, [info.id for info in infos]) if infos else {}
        stored = [sum(map(self._body_bytes, counts.get(info.id, ()))) for info in infos]
        return [KVSizes(info.tokens * self.token_bytes, size) for info, size in zip(infos, stored, strict=True)]

    def collection(self, info: CollectionInfo) -> KVSizes:
        """Return the bytes of the KV of a collection; `stored` is estimated from the mean length of its chunks."""
        mean = -(-info.tokens // info.chunks) if info.chunks else 0
        return KVSizes(info.tokens * self.token_bytes, info.chunks * self._body_bytes(mean) if mean else 0)

    def question_saves(self, info: DocumentInfo) -> float | None:
        """Estimate the seconds to the first token that one question over a document saves, by the costs measured here.

        A question reads as many of its chunks as are retrieved, at most all. A full prefill reads their tokens; stored
        KV has to be loaded, here as a whole, which a method that chooses blocks does not do.

        Returns:
            None where nothing was measured, or the model reuses no KV.
        """
        chunks = min(info.chunks, self._top_k)
        tokens = info.tokens * chunks // max(1, info.chunks)
        full = self._costs.full(tokens + QUESTION_TOKENS) - self._costs.full(QUESTION_TOKENS)
        if not self._reuses or full <= 0:
            return None
        mean = tokens // chunks if chunks else 0
        load = self._costs.load.at(chunks * self._body_bytes(mean)) if mean else 0.0
        return max(0.0, full - load) / 1000
