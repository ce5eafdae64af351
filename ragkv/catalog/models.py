"""What the catalogue hands out, beyond documents and chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EmbedderIdentity:
    """Which model made the vectors, and their length."""

    name: str
    dimension: int


@dataclass(frozen=True)
class DocumentInfo:
    """A document as the catalogue knows it. reader: what read it (model and chunk size) · created, updated: Unix s."""

    collection: str
    id: str
    title: str
    metadata: Mapping[str, Any]
    content_hash: str
    reader: str
    chunks: int
    tokens: int
    created: float
    updated: float


@dataclass(frozen=True)
class CollectionInfo:
    """How much a collection has; tokens: of all chunks."""

    name: str
    documents: int
    chunks: int
    tokens: int


@dataclass(frozen=True)
class Passage:
    """The part of a chunk that is embedded. row: its number in the catalogue, never used twice."""

    row: int
    title: str
    text: str


@dataclass(frozen=True)
class StoredTurn:
    """A question of a conversation and its answer. asked: token ids of the question part · written: of the answer, and
    of what stands between it and the next turn · joined: (row, id) of the chunks that came with the question, in the
    order of the prompt · method: it was asked with · reader: fingerprint of the model whose tokens these are ·
    created: Unix s · row: its number in the catalogue, never used twice; 0 before it is there."""

    question: str
    answer: str
    asked: tuple[int, ...]
    written: tuple[int, ...]
    joined: tuple[tuple[int, str], ...]
    method: str
    reader: str
    created: float = 0.0
    row: int = 0


@dataclass(frozen=True)
class Changes:
    """What turns a known set of chunk rows into those of `generation`. vectors [len(added), dimension]."""

    generation: int
    removed: NDArray[np.int64]
    added: NDArray[np.int64]
    vectors: NDArray[np.float32]
