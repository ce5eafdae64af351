"""What layers with a window have to hold: the blocks that a computed row can see there.

In such a layer the question sees the last positions alone: the end of the last chunks, so most of what a plan keeps is
neither given rows nor loaded there. All of this end is held, whatever the plan keeps of it: with gaps in the words
right before a question, models answer worse (docs/lab-notes.md). A recomputed row sees the window before itself, so
around recomputed tokens blocks stay. Positions are those of the context, in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ragkv.model.layer_kinds import LayerKind
from ragkv.recompute.base import Blocks, Piece, Plan, Tokens, rows_alive

Layer = tuple[Blocks, ...]
"""Blocks of every chunk."""


class WindowReach:
    """The chunks of a context and a question behind them, as layers with a window see them."""

    def __init__(self, kinds: Sequence[LayerKind], pieces: Sequence[Piece], starts: Sequence[int], end: int):
        """Set up.

        Args:
            kinds: the layers.
            pieces: the chunks.
            starts: position of each chunk's first token.
            end: position of the question's first token.
        """
        self._windows = [kind.window for kind in kinds]
        self._pieces, self._starts, self._end = pieces, starts, end

    def limit(self, requested: Sequence[Layer], computed: Sequence[Sequence[Tokens]] | None = None) -> list[Layer]:
        """Leave out the blocks [layer][chunk] that no row can see.

        Args:
            requested: the blocks.
            computed: tokens [layer][chunk] whose rows run through the layer beside the question; None for none.
        """
        known: dict[tuple[int, int, int | None], Layer] = {}
        found = list[Layer]()
        for layer, (blocks, window) in enumerate(zip(requested, self._windows, strict=True)):
            rows = computed[layer] if computed is not None else ()
            key = id(blocks), id(rows) if any(rows) else 0, window
            if key not in known:
                known[key] = blocks if window is None else self._seen(blocks, rows, window)
            found.append(known[key])
        return found

    def limit_plan(self, plan: Plan) -> Plan:
        """Leave out of a plan what no row can see, and keep all that the question sees in layers with a window.

        A plan that is completed while it runs may need every block.
        """
        if not any(self._windows) or plan.refinement is not None or plan.expansion is not None:
            return plan
        known: dict[tuple[int, int], Layer] = {}
        kept = self.limit(plan.kept, rows_alive(plan.recompute))
        for layer, (blocks, window) in enumerate(zip(kept, self._windows, strict=True)):
            if window is None:
                continue
            key = id(blocks), window
            if key not in known:
                known[key] = self._with_end(blocks, window)
            kept[layer] = known[key]
        return replace(plan, kept=tuple(kept))

    def _with_end(self, blocks: Layer, window: int) -> Layer:
        """Return the blocks of one layer and all others that the question sees."""
        every = tuple(tuple(range(piece.blocks)) for piece in self._pieces)
        end = self._seen(every, (), window)
        return tuple(tuple(sorted({*mine, *last})) for mine, last in zip(blocks, end, strict=True))

    def _seen(self, blocks: Layer, rows: Sequence[Tokens], window: int) -> Layer:
        """Return the blocks of one layer that the question or a computed row sees."""
        at = self._positions(rows)
        found = list[Blocks]()
        for piece, start, chosen in zip(self._pieces, self._starts, blocks, strict=True):
            numbers = np.array(chosen, dtype=np.int64)
            first = start + numbers * piece.block
            last = np.minimum(first + piece.block, start + piece.tokens) - 1
            near = last > self._end - window
            # Rows from the block's first position to a window behind its last one see a token of it.
            near |= np.searchsorted(at, last + window) > np.searchsorted(at, first)
            found.append(tuple(numbers[near].tolist()))
        return tuple(found)

    def _positions(self, rows: Sequence[Tokens]) -> NDArray[np.int64]:
        """Return the positions of tokens per chunk, ascending."""
        parts = [np.array(part, dtype=np.int64) + start for part, start in zip(rows, self._starts, strict=False)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])
