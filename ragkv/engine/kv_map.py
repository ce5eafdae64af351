"""The KV map: what an answer was read from, block by block and layer by layer. Made once its decoding has ended, so it
shows what was done and not what was planned: what CacheBlend's check left to recompute, what Multi-InfLLM added while
the question was read, what decoding brought back.

    kept         read as it lay there: the KV of the chunk alone; in a conversation also what an earlier turn repaired
    recomputed   read with rows that were computed again at this layer, all of the block's tokens or some. Where
                 everything was prefilled, all that was prefilled
    pulled       left out at first, brought back while the answer was decoded; read as it was stored
    dropped      not read

With the report (report.py) it agrees so: the share of a block's layers that are kept or recomputed is the chunk's
`kept`, pulled blocks over layers are `decoding.pulled`. `recomputed_tokens` counts tokens that enter a layer, the map
those whose rows the layer writes: the same, but where a method recomputes a token above and not here, so that it only
passes through (SamKV's rule 2); there the report has more.

It holds ids and no text: what a block says is looked up in the catalogue while it is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.engine.offloaded_blocks import OffloadedBlocks
from ragkv.engine.prefill_state import PrefilledContext
from ragkv.engine.request import RequestState
from ragkv.recompute.base import Blocks, Tokens
from ragkv.types import Hit

DROPPED, PULLED, KEPT = 0, 1, 2
"""What a cell says; KEPT + n: n of the block's tokens were computed again."""
LETTERS = "dpkr"
_BYTE = 256


@dataclass(frozen=True)
class ChunkMap:
    """One chunk of the map. row: in the catalogue, never used twice · block: tokens of a block · cells: of all blocks
    of the first layer, then of the second, and so on."""

    row: int
    chunk_id: str
    document_id: str
    title: str
    tokens: int
    block: int
    cells: Sequence[int]

    @property
    def blocks(self) -> int:
        """Number of blocks; a partial last one counts."""
        return -(-self.tokens // self.block)

    @property
    def states(self) -> tuple[str, ...]:
        """Per layer one of LETTERS for each block: dropped, pulled, kept, recomputed."""
        return tuple("".join(LETTERS[min(cell, KEPT + 1)] for cell in layer) for layer in self._layers())

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Per layer the share of each block's tokens that was computed again there, 0..1."""
        sizes = [min(self.block, self.tokens - start) for start in range(0, self.tokens, self.block)]
        return tuple(
            tuple(max(0, cell - KEPT) / size for cell, size in zip(layer, sizes, strict=True))
            for layer in self._layers()
        )

    def _layers(self) -> list[Sequence[int]]:
        return [self.cells[start : start + self.blocks] for start in range(0, len(self.cells), self.blocks)]


@dataclass(frozen=True)
class KVMap:
    """See the module. block: tokens of a block · chunks: all that the answer stands on, in prompt order; in a
    conversation those of its earlier turns, too."""

    block: int
    layers: int
    chunks: tuple[ChunkMap, ...]


def kv_map(request: RequestState, block: int, layers: int) -> KVMap:
    """The map of a question whose decoding has ended, before its conversation goes on. block, layers: of the model."""
    context, hits = request.context, request.session.hits
    rows = _prefilled(context, hits, block, layers) if context.plan is None else _planned(context, hits, block)
    chunks = tuple(
        ChunkMap(
            hit.row, hit.chunk.id, hit.chunk.document_id, hit.chunk.title, len(hit.chunk.tokens), block, _packed(cells)
        )
        for hit, cells in zip(hits, rows, strict=True)
    )
    return KVMap(block, layers, chunks)


def _prefilled(context: PrefilledContext, hits: Sequence[Hit], block: int, layers: int) -> list[list[int]]:
    """Everything was prefilled: now, or in an earlier turn."""
    cells = []
    for i, hit in enumerate(hits):
        tokens = len(hit.chunk.tokens)
        again = 0 if i < context.cached_chunks else block
        cells.append([KEPT + min(again, tokens - start) for start in range(0, tokens, block)] * layers)
    return cells


def _planned(context: PrefilledContext, hits: Sequence[Hit], block: int) -> list[list[int]]:
    plan, state = context.plan, context.decoding
    assert plan is not None
    absent = state.offloaded if state is not None and isinstance(state.offloaded, OffloadedBlocks) else None
    left = [set(blocks) for blocks in absent.remaining] if absent is not None else None
    found = []
    for i, hit in enumerate(hits):
        blocks, cells, layer = -(-len(hit.chunk.tokens) // block), list[int](), list[int]()
        before: tuple[object, object] = (None, None)
        for at, (kept, again) in enumerate(zip(plan.kept, plan.recompute, strict=True)):
            # As a rule layers share their choice, the very same tuples: then a large map is made as quickly as a small.
            if left is not None or before[0] is not kept[i] or before[1] is not again[i]:
                away = [DROPPED if left is None or (i, b) in left[at] else PULLED for b in range(blocks)]
                layer = _layer(away, kept[i], again[i], block)
            before = (kept[i], again[i])
            cells += layer
        found.append(cells)
    return found


def _layer(cells: list[int], kept: Blocks, again: Tokens, block: int) -> list[int]:
    """The cells of one chunk in one layer. cells: what they are where nothing was kept; changed."""
    for number in kept:
        cells[number] = KEPT
    for token in again:
        cells[token // block] += 1
    return cells


def _packed(cells: Sequence[int]) -> Sequence[int]:
    """A byte a cell; two where blocks are so long that a count does not fit."""
    return array("B" if max(cells, default=0) < _BYTE else "H", cells)
