"""Chunk sources: where the prefiller gets the KV blocks of a chunk.

A chunk that was just encoded is here. A stored chunk is in chunk_source.py; it needs the libraries of the stores, which
the computing modules must not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from torch import Tensor

from ragkv.engine.kv_transfer import PendingPin
from ragkv.engine.passes import Passes
from ragkv.kernels.transfer import PinnedBlocks
from ragkv.recompute.base import Blocks, Piece, Rows
from ragkv.types import ChunkKV


class ChunkSource(Protocol):
    """A chunk whose blocks can be loaded.

    Attributes:
        tokens: The chunk's token ids.
        piece: What a method needs to plan with the chunk.
    """

    tokens: tuple[int, ...]
    piece: Piece

    def load(self, requested: Sequence[Blocks]) -> Passes[list[Rows]]:
        """Return per layer the pre-RoPE rows of the wanted blocks. A chunk that has to be encoded yields its pass."""
        ...

    def load_states(self) -> Passes[tuple[Tensor, ...]]:
        """Return the states behind the chunk (`ChunkKV.states`), as `load` returns rows."""
        ...

    def pin(self, requested: Sequence[Blocks], threads: Executor) -> PendingPin:
        """Start to pin the wanted blocks in memory, in one of the threads if they have to be fetched."""
        ...


class InMemoryChunk:
    """A source over a chunk that was just encoded."""

    def __init__(self, kv: ChunkKV, block: int, exact: bool = False):
        """Wrap an encoded chunk.

        Args:
            kv: The chunk.
            block: Tokens of a block.
            exact: As in `Piece`.
        """
        self.tokens, self._kv = kv.tokens, kv
        self.piece = Piece(len(kv.tokens), block, kv.digest, exact)

    def load(self, requested: Sequence[Blocks]) -> Passes[list[Rows]]:
        """Return slices of the encoded chunk, without a pass."""
        yield from ()
        rows = [list(self.piece.rows(blocks)) for blocks in requested]
        return [(self._kv.k[layer, r], self._kv.v[layer, r]) for layer, r in enumerate(rows)]

    def load_states(self) -> Passes[tuple[Tensor, ...]]:
        """Return the states behind the chunk, without a pass."""
        yield from ()
        return self._kv.states

    def pin(self, requested: Sequence[Blocks], threads: Executor) -> PendingPin:
        """Pin nothing, because no block is in a tier."""
        return no_blocks


def no_blocks() -> PinnedBlocks | None:
    """Return None: the pin of a chunk without blocks in a tier."""
    return None
