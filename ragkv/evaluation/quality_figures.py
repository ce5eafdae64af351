"""Figures of answers that were compared (quality.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ragkv.engine.memory_source import ChunkSource
from ragkv.evaluation.sets import SetQuestion


class ReadChunk(ChunkSource, Protocol):
    """A stored chunk that counts its bytes.

    Attributes:
        head_bytes: bytes of the head record.
        state_bytes: bytes of the states of layers that have one.
    """

    head_bytes: int
    state_bytes: int

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the blocks that were loaded."""
        ...


@dataclass(frozen=True)
class QualityFigures:
    """Figures of one question and method.

    Attributes:
        em: exact match.
        f1: token F1.
        recall: 1 if all blocks of the answer are kept in every layer, or if the answer's place is not known.
        layer_recall: share of the layers in which all blocks of the answer are kept, likewise; None in records of
            earlier releases.
        middle: kept blocks that are neither initial nor local ones of their chunk / all blocks.
        sequence: tokens kept / all tokens.
        recompute: tokens recomputed / all tokens.
        stopped: 1 if the answer ended by itself and is a span of the context or "unknown".
        kv: bytes of the kept KV.
        ttft: milliseconds, KV in memory.
        ttft_load: milliseconds, KV in a store; None without a store.
        load: bytes loaded / bytes of the full KV; None without a store.
        read: query-key pairs computed / those of a dense prefill of everything; None for methods that reuse stored KV.
    """

    em: float
    f1: float
    recall: float
    middle: float
    sequence: float
    recompute: float
    stopped: float
    kv: float
    ttft: float
    ttft_load: float | None = None
    load: float | None = None
    read: float | None = None
    layer_recall: float | None = None


@dataclass(frozen=True)
class QualityOutcome:
    """The answer of one method to one question.

    Attributes:
        at: (number of the set, number of its question).
    """

    question: SetQuestion
    method: str
    answer: str
    figures: QualityFigures
    at: tuple[int, int] = (0, 0)
