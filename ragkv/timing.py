"""Timing of the steps of one request. On a GPU the execution of the work is measured, not its submission."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Interval:
    """One measured run of a step.

    Attributes:
        name: Name of the step.
        start: Start, in milliseconds since the timer was created.
        end: End, in milliseconds since the timer was created.
    """

    name: str
    start: float
    end: float


_Timestamp = Callable[[], float]
"""Returns a point in time in milliseconds since the timer was created; waits until the device has reached it."""


class StepTimer:
    """Measures the steps of one request, in milliseconds by step name.

    On a GPU a step ends when the device has finished its work. Measuring does not synchronise: CUDA events record the
    times, and only reading the intervals waits for the events.

    Attributes:
        started: When the timer was created, in seconds of `time.perf_counter`.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        """Start a timer for work on `device`."""
        self._start_event: Any = None
        self._stream: Any = None
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
            # Asking for the current stream takes longer than recording an event.
            self._stream = torch.cuda.current_stream()
            self._start_event = _record_event(self._stream)
        self.started = time.perf_counter()
        self._recorded: list[tuple[str, _Timestamp, _Timestamp]] = []

    @property
    def intervals(self) -> list[Interval]:
        """All recorded intervals, in order. Other threads may read them at any time."""
        return [Interval(name, start(), end()) for name, start, end in tuple(self._recorded)]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the block as a run of the step `name`."""
        start = self._timestamp()
        try:
            yield
        finally:
            self._recorded.append((name, start, self._timestamp()))

    def record(self, name: str, start: float, end: float) -> None:
        """Add a run of the step `name` from `start` to `end`, which are values of `total`."""
        self._recorded.append((name, lambda: start, lambda: end))

    def elapsed(self, name: str) -> float:
        """Return the milliseconds of all runs of the step `name`; 0 if it never ran."""
        return sum((interval.end - interval.start for interval in self.intervals if interval.name == name), 0.0)

    def total(self) -> float:
        """Return the milliseconds since the timer was created, after all queued GPU work has finished."""
        if self._start_event is not None:
            torch.cuda.synchronize()
        return self._since_start()

    def _since_start(self) -> float:
        return 1000 * (time.perf_counter() - self.started)

    def _timestamp(self) -> _Timestamp:
        if self._start_event is None:
            now = self._since_start()
            return lambda: now
        start_event, event = self._start_event, _record_event(self._stream)

        def wait() -> float:
            event.synchronize()
            return float(start_event.elapsed_time(event))

        return wait


def _record_event(stream: Any) -> Any:
    """Record a CUDA event on a stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
