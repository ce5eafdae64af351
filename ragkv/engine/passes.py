"""Work that stops at every pass, so that whoever drives it decides which passes of several requests run together.

A generator of `Passes` yields a pass and is sent its logits. What it computes depends on its own cache only, so it does
not matter which passes of other requests run beside its own, or how long it waits in between.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor

from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import Pass

T = TypeVar("T")

Passes = Generator[Pass, Tensor, T]
"""Yields a pass, is sent its logits [O, vocabulary], and returns what came of all passes."""


def run_alone(model: DecoderModel, passes: Passes[T]) -> T:
    """Run every pass by itself, as it comes; return what came of them."""
    try:
        layer_pass = next(passes)
        while True:
            layer_pass = passes.send(model.forward([layer_pass])[0])
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        passes.close()
