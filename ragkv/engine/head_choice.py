"""Which heads find the blocks that hold an answer, and which layers are stable (calibration.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.engine.needles import span_tokens
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import SCOUT_BLOCK
from ragkv.recompute.scout import join_heads

CAP_LOSS = 0.01
"""Recall that a smaller cap may lose."""


@dataclass(frozen=True)
class CalibrationParams:
    """Parameters of a calibration.

    Attributes:
        heads: Largest number of retrieval heads.
        budgets: Shares of the blocks at which recall is measured.
        block: Tokens per block from now on; 0 keeps the profile's.
        power: As in `Scout`.
        reaches: Values of `Scout.reach` to choose from.
        caps: Values of `Scout.cap` to choose from, in ascending order.
    """

    heads: int = 3
    budgets: tuple[float, ...] = (0.03, 0.06)
    block: int = SCOUT_BLOCK
    power: float = 0.5
    reaches: tuple[int, ...] = (8,)
    caps: tuple[float, ...] = (0.2,)


USUAL = CalibrationParams()


@dataclass(frozen=True)
class CalibrationTrial:
    """Attention of one question.

    Attributes:
        masses: Share of the attention of every head on every block [L*Hq, N].
        gold: bool [N], blocks that hold the answer.
    """

    masses: Tensor
    gold: Tensor


def gold_blocks(model: DecoderModel, title: str, text: str, start: int, end: int) -> tuple[int, ...]:
    """Return the blocks of a chunk that hold a token of text[start:end]."""
    piece = model.prompt.chunk_text(title, text)
    offsets = model.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    shift = piece.index(text)
    span = span_tokens(offsets, start + shift, end + shift)
    return tuple(sorted({token // model.profile.block for token in span}))


def pick_heads(trials: Sequence[CalibrationTrial], params: CalibrationParams) -> list[int]:
    """Pick retrieval heads greedily, until another head no longer helps."""
    heads: list[int] = []
    best = 0.0
    for _ in range(params.heads):
        candidates = [
            (score_heads(trials, [*heads, head], params), -head)
            for head in range(trials[0].masses.shape[0])
            if head not in heads
        ]
        merit, head = max(candidates)
        if merit <= best:
            break
        best, heads = merit, [*heads, -head]
    return heads


def recall(trials: Sequence[CalibrationTrial], heads: Sequence[int], budget: float, power: float) -> float:
    """Compute the share of the questions whose answer blocks are all among the best blocks.

    Args:
        trials: The questions.
        heads: Heads that score the blocks.
        budget: Share of all blocks that counts as the best.
        power: As in `Scout`.
    """
    found = 0
    for t in trials:
        mass = join_heads(t.masses[list(heads)], power)
        best = mass.topk(max(1, int(budget * mass.shape[0]))).indices
        kept = torch.zeros_like(t.gold)
        kept[best] = True
        found += bool(kept[t.gold].all())
    return found / len(trials)


def stable_layers(scores: Sequence[int]) -> tuple[int, ...]:
    """Return N*: the last consecutive layers that score at least half the maximum, at least max(1, round(L/8)) layers.

    Paper silent on the threshold; it takes the last few layers of every model.
    """
    layers = len(scores)
    first = layers - max(1, round(layers / 8))
    while first > layers // 2 and scores[first - 1] * 2 >= max(scores) > 0:
        first -= 1
    return tuple(range(first, layers))


def smallest_cap(caps: Sequence[float], recalls: Sequence[float]) -> float:
    """Return the first of `caps`, in ascending order, whose recall is within `CAP_LOSS` of the best."""
    return next(cap for cap, found in zip(caps, recalls, strict=True) if found >= max(recalls) - CAP_LOSS)


def score_heads(trials: Sequence[CalibrationTrial], heads: Sequence[int], params: CalibrationParams) -> float:
    """Add up recall over the budgets, and a small weight for the share of attention on the answer."""
    on_answer = sum(float(join_heads(t.masses[list(heads)], params.power)[t.gold].sum()) for t in trials) / len(trials)
    return sum(recall(trials, heads, budget, params.power) for budget in params.budgets) + 0.2 * on_answer
