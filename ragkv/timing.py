"""A stopwatch for the steps of one request. Time on a GPU is counted when the work is done, not when it is queued."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Interval:
    """A step, once: from when to when, in milliseconds since its watch was made."""

    name: str
    start: float
    end: float


Mark = Callable[[], float]
"""A moment, in milliseconds since the watch was made; told when it has come."""


class StepTimer:
    """Milliseconds by step name. One per request.

    began: when it was made, in seconds of `time.perf_counter`.

    On a GPU a step ends when its work is done there, and yet nothing waits for that: the device notes the time itself,
    and only who reads the intervals waits for what they measure.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._zero: Any = None
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
            self._zero = _now()
        self.started = time.perf_counter()
        self._booked: list[tuple[str, Mark, Mark]] = []

    @property
    def intervals(self) -> list[Interval]:
        """What was booked, in that order; others may look at it at any time."""
        return [Interval(name, start(), end()) for name, start, end in tuple(self._booked)]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Book the time of the block under `name`; the same name adds up."""
        start = self._mark()
        try:
            yield
        finally:
            self._booked.append((name, start, self._mark()))

    def book(self, name: str, start: float, end: float) -> None:
        """`name` took from `start` to `end`, as `total` told them."""
        self._booked.append((name, lambda: start, lambda: end))

    def elapsed(self, name: str) -> float:
        """Milliseconds booked under `name`; 0 when the step never ran."""
        return sum((each.end - each.start for each in self.intervals if each.name == name), 0.0)

    def total(self) -> float:
        """Milliseconds since the watch was made, when all that was queued on a GPU is done."""
        if self._zero is not None:
            torch.cuda.synchronize()
        return self._since_start()

    def _since_start(self) -> float:
        return 1000 * (time.perf_counter() - self.started)

    def _mark(self) -> Mark:
        if self._zero is None:
            now = self._since_start()
            return lambda: now
        zero, event = self._zero, _now()

        def told() -> float:
            event.synchronize()
            return float(zero.elapsed_time(event))

        return told


def _now() -> Any:
    """An event of the current stream: the time when the device gets to it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
