"""Plans that are completed while they run.

CacheBlend decides which tokens to recompute while it recomputes (`refine`). Multi-InfLLM decides which blocks join the
cache while the question is prefilled (`expand`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragkv.engine.passes import Passes
from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import Attention, Capture, Pass, Step
from ragkv.recompute.base import Expansion, Piece, Plan, Refinement, Rows


class AdaptivePlan:
    """A plan, and the context cache it is carried out on. State of one request."""

    def __init__(self, model: DecoderModel, stitch: Stitch, plan: Plan, attention: Attention | None = None):
        """Set up a plan; attention: of the rows that are recomputed, or of the question's; None is dense."""
        self._model, self._stitch, self._plan, self._attention = model, stitch, plan, attention

    def refine(self, refinement: Refinement, tokens: Sequence[Sequence[int]], cached_chunks: int) -> Passes[Plan]:
        """Recompute layer by layer, a pass each. From layer to layer fewer tokens stay: those that differ most.

        Args:
            refinement: Which share of the tokens stays after each layer, and how the difference from what is stored is
                measured.
            tokens: Token ids of every chunk.
            cached_chunks: Number of leading chunks that an earlier turn repaired. Shares do not count them.

        Returns:
            The plan with the tokens that were recomputed.
        """
        stitch, layers, total = self._stitch, self._model.shape.layers, sum(map(len, tokens[cached_chunks:]))
        hidden: Tensor | None = None
        positions, start = stitch.positions(self._plan.recompute[0]), 0
        done: list[Tensor] = []
        for layer, share in enumerate(refinement.shares, start=refinement.layer):
            if not positions.numel():
                break
            stored = stitch.rows(layer, positions)
            capture = Capture()
            again = stitch.again(tokens, positions, start, layer + 1, hidden)
            yield replace(again, capture=capture, attention=self._attention)
            done += [positions] * (layer + 1 - len(done))
            difference = refinement.measure(stitch.rows(layer, positions), stored)
            count = math.ceil(share * total - 1e-9)
            best = difference.argsort(descending=True, stable=True)[:count].sort().values
            hidden = None if capture.entered is None else capture.entered[best]
            positions, start = positions[best.cpu()], layer
        if positions.numel():
            yield replace(stitch.again(tokens, positions, start, layers, hidden), attention=self._attention)
        done += [positions] * (layers - len(done))
        distinct = {id(rows): rows for rows in done}  # most layers recompute the same tokens
        found = {number: stitch.tokens(rows) for number, rows in distinct.items()}
        return replace(self._plan, recompute=tuple(found[id(rows)] for rows in done))

    def expand(
        self,
        expansion: Expansion,
        pieces: Sequence[Piece],
        stored: Sequence[Sequence[Rows]],
        question: Sequence[int],
        outputs: int = 1,
    ) -> Passes[tuple[Tensor, Plan]]:
        """Prefill the question layer by layer, a pass each. Its queries decide which blocks join before they attend.

        Args:
            expansion: Chooses the blocks of a layer.
            pieces: The chunks.
            stored: All rows [chunk][layer].
            question: Token ids.
            outputs: How many of the last rows reach the attention of the last layer.

        Returns:
            Logits [vocabulary] of the last row, and the plan with the blocks that were read.
        """
        stitch, layers, length = self._stitch, self._model.shape.layers, len(question)
        ids, positions = torch.tensor(question, dtype=torch.int64), torch.arange(stitch.end, stitch.end + length)
        hidden: Tensor | None = None
        slots, kept = [], []
        for layer in range(layers):
            slots.append(stitch.cache.reserve(layer, positions))
            capture, start = Capture(), max(0, layer - 1)
            steps = [Step(None, slots[number]) for number in range(start, layer + 1)]
            until = Pass(ids, positions, stitch.cache, steps, None, capture, layer + 1, start, hidden, self._attention)
            yield until
            hidden = capture.entered
            joining = expansion(layer, capture.q[-1], [rows[layer][0] for rows in stored])
            fixed = self._plan.kept[layer]
            kept.append(tuple(tuple(sorted({*a, *b})) for a, b in zip(fixed, joining, strict=True)))
            chosen = [list(piece.rows(blocks)) for piece, blocks in zip(pieces, kept[-1], strict=True)]
            stitch.put(
                layer,
                [(i, tuple(r), (stored[i][layer][0][r], stored[i][layer][1][r])) for i, r in enumerate(chosen)],
                self._plan.key_positions,
            )
        last = Step(None, slots[-1], leave=torch.arange(max(0, length - outputs), length))
        end = Pass(ids, positions, stitch.cache, [last], start=layers - 1, hidden=hidden, attention=self._attention)
        logits = yield end
        return logits[-1], replace(self._plan, kept=tuple(kept))
