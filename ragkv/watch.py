"""A stopwatch for the steps of one request. Time on a GPU is counted when the work is done, not when it is queued."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Watch:
    """Milliseconds by step name. One per request."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._synchronise = torch.device(device).type == "cuda"
        self._start = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Book the time of the block under `name`; the same name adds up."""
        start = self.total()
        try:
            yield
        finally:
            self.book(name, self.total() - start)

    def book(self, name: str, milliseconds: float) -> None:
        """Add to what `name` took."""
        self._spent[name] = self._spent.get(name, 0.0) + milliseconds

    def spent(self, name: str) -> float:
        """Milliseconds booked under `name`; 0 when the step never ran."""
        return self._spent.get(name, 0.0)

    def total(self) -> float:
        """Milliseconds since the watch was made."""
        if self._synchronise:
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - self._start)
