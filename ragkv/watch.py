"""A stopwatch for the steps of one request. Time on a GPU is counted when the work is done, not when it is queued."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Interval:
    """A step, once: from when to when, in milliseconds since its watch was made."""

    name: str
    start: float
    end: float


class Watch:
    """Milliseconds by step name. One per request.

    began: when it was made, in seconds of `time.perf_counter` · intervals: what was booked, in that order; others may
    look at it at any time.
    """

    def __init__(self, device: torch.device | str = "cpu", wait: bool = True):
        """wait: for what the device has queued, at both ends of every step; False leaves the device at work, and a step
        is then the time to queue its work."""
        self._synchronise = wait and torch.device(device).type == "cuda"
        self.began = time.perf_counter()
        self.intervals: list[Interval] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Book the time of the block under `name`; the same name adds up."""
        start = self.total()
        try:
            yield
        finally:
            self.book(name, start, self.total())

    def book(self, name: str, start: float, end: float) -> None:
        """`name` took from `start` to `end`, as `total` told them."""
        self.intervals.append(Interval(name, start, end))

    def spent(self, name: str) -> float:
        """Milliseconds booked under `name`; 0 when the step never ran."""
        return sum((each.end - each.start for each in self.intervals if each.name == name), 0.0)

    def total(self) -> float:
        """Milliseconds since the watch was made."""
        if self._synchronise:
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - self.began)
