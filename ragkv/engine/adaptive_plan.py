"""Plans that are decided on the way: what is recomputed shows while recomputing, what is read while reading.

follow(plan.check)   CacheBlend: layer by layer, fewer tokens go on, those that differ most from what was stored
grow(plan.grow)      Multi-InfLLM: the question is read layer by layer, and asks in each for what joins the cache there
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import Attention, Capture, Pass, Step
from ragkv.recompute.base import Expansion, Piece, Plan, Refinement, Rows


def refine(
    model: DecoderModel, stitch: Stitch, tokens: Sequence[Sequence[int]], plan: Plan, check: Refinement, known: int
) -> Plan:
    """Recompute while choosing what to recompute; returns the plan as it was carried out. known: chunks whose turn
    it was before: shares are of the others."""
    layers, total = model.shape.layers, sum(map(len, tokens[known:]))
    hidden: Tensor | None = None
    present, start = stitch.positions(plan.recompute[0]), 0
    done: list[Tensor] = []
    for layer, share in enumerate(check.shares, start=check.layer):
        if not present.numel():
            break
        stored = stitch.rows(layer, present)
        capture = Capture()
        model.forward([stitch.again(tokens, present, start, layer + 1, hidden, capture)])
        done += [present] * (layer + 1 - len(done))
        apart = check.measure(stitch.rows(layer, present), stored)
        best = apart.argsort(descending=True, stable=True)[: math.ceil(share * total - 1e-9)].sort().values
        hidden = None if capture.entered is None else capture.entered[best]
        present, start = present[best.cpu()], layer
    if present.numel():
        model.forward([stitch.again(tokens, present, start, layers, hidden)])
    done += [present] * (layers - len(done))
    return replace(plan, recompute=tuple(stitch.tokens(rows) for rows in done))


def expand(
    model: DecoderModel,
    stitch: Stitch,
    pieces: Sequence[Piece],
    stored: Sequence[Sequence[Rows]],
    question: Sequence[int],
    plan: Plan,
    expansion: Expansion,
    attention: Attention | None = None,
    outputs: int = 1,
) -> tuple[Tensor, Plan]:
    """Read the question layer by layer: its queries there say what joins the cache before they attend. Returns the
    last row's logits and the plan as it was carried out.

    stored: all rows [chunk][layer] · outputs: how many of the last rows reach the last layer's attention.
    """
    layers, length = model.shape.layers, len(question)
    ids, asked = torch.tensor(question, dtype=torch.int64), torch.arange(stitch.end, stitch.end + length)
    hidden: Tensor | None = None
    slots, kept = [], []
    for layer in range(layers):
        slots.append(stitch.cache.reserve(layer, asked))
        capture, start = Capture(), max(0, layer - 1)
        steps = [Step(None, slots[number]) for number in range(start, layer + 1)]
        to_here = Pass(ids, asked, stitch.cache, steps, None, capture, layer + 1, start, hidden, attention)
        model.forward([to_here])
        hidden = capture.entered
        more = expansion(layer, capture.q[-1], [rows[layer][0] for rows in stored])
        kept.append(tuple(tuple(sorted({*a, *b})) for a, b in zip(plan.kept[layer], more, strict=True)))
        chosen = [list(piece.rows(blocks)) for piece, blocks in zip(pieces, kept[-1], strict=True)]
        stitch.put(
            layer,
            [(i, tuple(r), (stored[i][layer][0][r], stored[i][layer][1][r])) for i, r in enumerate(chosen)],
            plan.key_positions,
        )
    last = Step(None, slots[-1], leave=torch.arange(max(0, length - outputs), length))
    ended = Pass(ids, asked, stitch.cache, [last], start=layers - 1, hidden=hidden, attention=attention)
    return model.forward([ended])[0][-1], replace(plan, kept=tuple(kept))
