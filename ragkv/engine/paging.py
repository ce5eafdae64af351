"""Paging: which rows of a context an answer reads where they lie, in the blocks of the GPU tier.

The prefill of a question stitches all rows into a cache of its own. When it is done, rows that are still as they are
stored, and whose blocks are in the model's memory, are dropped from that cache: decoding reads the blocks in place
(`model/execution/block_tables.py`). All answers that read a chunk share its blocks. Blocks with a token that was
recomputed stay in the cache (copy on write), and so does everything that has no blocks: S, the question, the answer.

The blocks are pinned until the answer ends. A conversation keeps all its rows: its next turn computes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.engine.chunk_source import StoredChunk
from ragkv.model.execution.block_tables import PagedChunk, PagedContext, rows_in_blocks
from ragkv.model.kv_cache import ContextCache
from ragkv.recompute.base import Blocks, Plan, Tokens
from ragkv.types import Shape


def page_context(
    cache: ContextCache, plan: Plan, sources: Sequence[StoredChunk], starts: Sequence[int], room: int
) -> PagedContext | None:
    """Drop the rows that can be read in place from a cache.

    Args:
        cache: A context that is prefilled, of one question.
        plan: What it keeps, and which tokens were recomputed.
        sources: Its chunks.
        starts: Position of each chunk's first token.
        room: Rows that will be appended.

    Returns:
        What is read in place, to be closed when the answer has ended; None where that is nothing.
    """
    if plan.key_positions is not None or plan.expansion is not None:
        return None  # keys are rotated to other positions than those of their tokens
    chunks, layers = list[PagedChunk](), list(zip(plan.kept, plan.recompute, strict=True))
    with ExitStack() as pins:
        for i, (source, start) in enumerate(zip(sources, starts, strict=True)):
            requested = [_untouched(kept[i], again[i], source.piece.block) for kept, again in layers]
            resident = source.pin_resident(requested)
            if resident is not None:
                pins.callback(resident.release)
                chunks.append(PagedChunk(resident.key, source.piece.tokens, start, resident.addresses))
        if not any(chunk.addresses.any() for chunk in chunks):
            return None
        block = sources[0].piece.block
        _drop_rows(cache, chunks, block, room)
        rows = rows_in_blocks(chunks, cache.shape, block)
        return PagedContext(chunks, rows, pins.pop_all().close)


def _untouched(kept: Blocks, recomputed: Tokens, block: int) -> Blocks:
    """Return the kept blocks in which no token was recomputed."""
    if not recomputed:
        return kept
    touched = {token // block for token in recomputed}
    return tuple(each for each in kept if each not in touched)


def _drop_rows(cache: ContextCache, chunks: Sequence[PagedChunk], block: int, room: int) -> None:
    """Keep the rows of a cache that are in no block."""
    end = max(chunk.start + chunk.tokens for chunk in chunks)
    in_place = _positions_in_blocks(chunks, cache.shape, block, end)
    left: dict[tuple[bytes, bytes], torch.Tensor] = {}
    rows = list[torch.Tensor]()
    for layer in range(cache.shape.layers):
        positions = cache.positions(layer).numpy()
        key = positions.tobytes(), in_place[layer].tobytes()
        if key not in left:  # most layers have the same rows
            inside = positions < end
            own = ~inside
            own[inside] = ~in_place[layer][positions[inside]]
            left[key] = torch.from_numpy(np.flatnonzero(own))
        rows.append(left[key])
    cache.keep(rows, room)


def _positions_in_blocks(chunks: Sequence[PagedChunk], shape: Shape, block: int, end: int) -> NDArray[np.bool_]:
    """Return [L, end], whether a layer reads the row at a position in a block."""
    found = np.zeros((shape.layers, end), dtype=np.bool_)
    for chunk in chunks:
        rows = (chunk.addresses != 0).repeat(block, axis=1)[:, : chunk.tokens]
        found[:, chunk.start : chunk.start + chunk.tokens] = rows
    return found
