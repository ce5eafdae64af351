"""The KV map: what an answer was read from, block by block and layer by layer.

It is made once decoding has ended, so it shows what was done and not what was planned: the tokens that CacheBlend
recomputed in the end, the blocks that Multi-InfLLM added, the blocks that were fetched during decoding.

    kept         read as stored: the KV of the chunk alone; in a conversation also rows that an earlier turn repaired
    recomputed   some or all of the block's rows were computed again at this layer. With a full prefill: all rows
    pulled       left out at first, fetched while the answer was decoded; read as stored
    dropped      not read

How it agrees with the report (report.py): the share of a block's layers that are kept or recomputed is the chunk's
`kept`, and the pulled blocks over all layers are `decoding.pulled`. `recomputed_tokens` counts tokens that enter a
layer;
the map counts tokens whose rows the layer writes. The two differ where a token only passes through a layer (SamKV's
rule 2): there the report counts more.

The map holds ids and no text. The text of a block is looked up in the catalogue while it is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.engine.offloaded_blocks import OffloadedBlocks
from ragkv.engine.prefill_state import PrefilledContext
from ragkv.engine.session_cache import Session
from ragkv.recompute.base import Blocks, Tokens
from ragkv.types import Hit

DROPPED, PULLED, KEPT = 0, 1, 2
"""Values of a cell; KEPT + n: n of the block's tokens were computed again."""
LETTERS = "dpkr"
_BYTE = 256


@dataclass(frozen=True)
class ChunkKVMap:
    """One chunk of the map.

    Attributes:
        row: Its row in the catalogue, never used twice.
        chunk_id: Id of the chunk.
        document_id: Id of its document.
        title: Title of the document.
        tokens: Tokens of the chunk.
        block: Tokens of a block.
        cells: One number a block: all blocks of the first layer, then of the second, and so on.
    """

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
    """The map of one answer.

    Attributes:
        block: Tokens of a block.
        layers: Layers of the model.
        chunks: Chunks of the context in prompt order, in a conversation those of earlier turns as well; behind them
            those that were retrieved and left out.
    """

    block: int
    layers: int
    chunks: tuple[ChunkKVMap, ...]


def kv_map(context: PrefilledContext, session: Session, block: int, layers: int) -> KVMap:
    """Make the map of an answer whose decoding has ended, before its conversation continues."""
    hits, left_out = session.hits, session.left_out
    rows = _prefilled(context, hits, block, layers) if context.plan is None else _planned(context, hits, block)
    rows += [[DROPPED] * (-(-len(hit.chunk.tokens) // block) * layers) for hit in left_out]
    chunks = tuple(
        ChunkKVMap(
            hit.row, hit.chunk.id, hit.chunk.document_id, hit.chunk.title, len(hit.chunk.tokens), block, _packed(cells)
        )
        for hit, cells in zip([*hits, *left_out], rows, strict=True)
    )
    return KVMap(block, layers, chunks)


def _prefilled(context: PrefilledContext, hits: Sequence[Hit], block: int, layers: int) -> list[list[int]]:
    """Cells where everything was prefilled, now or in an earlier turn."""
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
            # Layers usually share the same tuples; then their cells are computed once.
            if left is not None or before[0] is not kept[i] or before[1] is not again[i]:
                away = [DROPPED if left is None or (i, b) in left[at] else PULLED for b in range(blocks)]
                layer = _layer(away, kept[i], again[i], block)
            before = (kept[i], again[i])
            cells += layer
        found.append(cells)
    return found


def _layer(cells: list[int], kept: Blocks, again: Tokens, block: int) -> list[int]:
    """Fill in the cells of one chunk in one layer; `cells` is changed and returned."""
    for number in kept:
        cells[number] = KEPT
    for token in again:
        cells[token // block] += 1
    return cells


def _packed(cells: Sequence[int]) -> Sequence[int]:
    """Pack cells into bytes; two bytes a cell where blocks are so long that a count does not fit."""
    return array("B" if max(cells, default=0) < _BYTE else "H", cells)
