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
class Passage:
    """The part of a chunk that is embedded. row: its number in the catalogue, never used twice."""

    row: int
    title: str
    text: str


@dataclass(frozen=True)
class Changes:
    """What turns a known set of chunk rows into those of `generation`. vectors [len(added), dimension]."""

    generation: int
    removed: NDArray[np.int64]
    added: NDArray[np.int64]
    vectors: NDArray[np.float32]
