"""A profile for weights without calibration, so that every method can be timed on them."""

from __future__ import annotations

import copy
from dataclasses import replace

from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import SCOUT_BLOCK
from ragkv.types import Shape

HEADS = 8
DEEPEST = 0.6
"""Share of the layers; no retrieval head is in a later layer."""


def retrieval_heads(shape: Shape) -> tuple[tuple[int, int], ...]:
    """As many heads as calibration chooses, where it usually finds them.

    They are spread over the layers from one third to DEEPEST, and over the kv heads.
    """
    first = shape.layers // 3
    last = max(first + 1, int(DEEPEST * shape.layers))
    spread = ((first + i * (last - first) // HEADS, i * shape.q_heads // HEADS) for i in range(HEADS))
    return tuple(sorted(set(spread)))


def fitted(model: DecoderModel, block: int = 0) -> DecoderModel:
    """The same weights with a complete profile. block: tokens of a block; 0: as for a calibrated model."""
    fit = copy.copy(model)
    heads = model.profile.retrieval_heads or retrieval_heads(model.shape)
    fit.profile = replace(model.profile, retrieval_heads=heads, block=block or SCOUT_BLOCK)
    return fit
