"""What a reader takes blocks from: a chunk that is stored (sources.py), or one that was encoded a moment ago."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from ragkv.engine.kv_transfer import PendingPin
from ragkv.recompute.base import Blocks, Piece, Rows
from ragkv.types import ChunkKV


class ChunkSource(Protocol):
    """A chunk the reader can take blocks from."""

    tokens: tuple[int, ...]
    piece: Piece

    def load(self, wanted: Sequence[Blocks]) -> list[Rows]:
        """Per layer, the pre-RoPE rows of the wanted blocks."""
        ...

    def pin(self, wanted: Sequence[Blocks], threads: Executor) -> PendingPin:
        """Begin to bring the wanted blocks into memory, as they are stored, in one of the threads if need be."""
        ...


class InMemoryChunk:
    """A source in memory: a chunk that was encoded a moment ago."""

    def __init__(self, kv: ChunkKV, block: int, exact: bool = False):
        self.tokens, self._kv = kv.tokens, kv
        self.piece = Piece(len(kv.tokens), block, kv.digest, exact)

    def load(self, wanted: Sequence[Blocks]) -> list[Rows]:
        """Slices of the encoded chunk; nothing is read from anywhere."""
        rows = [list(self.piece.rows(blocks)) for blocks in wanted]
        return [(self._kv.k[layer, r], self._kv.v[layer, r]) for layer, r in enumerate(rows)]

    def pin(self, wanted: Sequence[Blocks], threads: Executor) -> PendingPin:
        """Nothing is stored."""
        return lambda: None
