"""Work that stops at every pass, so that whoever drives it decides which passes of several requests run together.

A generator of `Passes` yields a pass and is sent its logits. What it computes depends on its own cache only, so it does
not matter which passes of other requests run beside its own, or how long it waits in between. Where it has to wait for
something else than a pass, it yields a `Pause`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import Pass

T = TypeVar("T")


@dataclass(frozen=True)
class Pause:
    """Nothing to compute until some time, so others go on. The generator is then resumed without logits.

    Attributes:
        until: On the monotonic clock.
    """

    until: float

    @property
    def seconds(self) -> float:
        """Seconds that are left, 0 when the pause is over."""
        return max(0.0, self.until - time.monotonic())


Passes = Generator[Pass | Pause, Tensor, T]
"""Yields a pass, is sent its logits [O, vocabulary], and returns what came of all passes; or yields a pause."""


def run_alone(model: DecoderModel, passes: Passes[T]) -> T:
    """Run every pass by itself, as it comes, and sleep during pauses; return what came of them."""
    try:
        step = next(passes)
        while True:
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                step = next(passes)
            else:
                step = passes.send(model.forward([step])[0])
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        passes.close()
