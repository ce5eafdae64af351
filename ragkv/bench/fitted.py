"""A profile for weights that nobody calibrated, so that every method can be timed on them."""

from __future__ import annotations

import copy
from dataclasses import replace

from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import CALIBRATED_BLOCK
from ragkv.types import Shape

HEADS = 8
DEEPEST = 0.6
"""Share of the layers above which no retrieval head lies."""


def retrieval_heads(shape: Shape) -> tuple[tuple[int, int], ...]:
    """As many heads as calibration names, where it finds them: spread over the middle third down to DEEPEST of the
    layers, and over the kv heads."""
    first = shape.layers // 3
    last = max(first + 1, int(DEEPEST * shape.layers))
    spread = ((first + i * (last - first) // HEADS, i * shape.q_heads // HEADS) for i in range(HEADS))
    return tuple(sorted(set(spread)))


def fitted(model: DecoderModel, block: int = 0) -> DecoderModel:
    """The same weights with a profile that every method can go by. block: tokens of one, 0: as a calibrated model's."""
    fit = copy.copy(model)
    heads = model.profile.retrieval_heads or retrieval_heads(model.shape)
    fit.profile = replace(model.profile, retrieval_heads=heads, block=block or CALIBRATED_BLOCK)
    return fit
