"""The clock of single modules.

One of the whole process would hold up the event loops that other tests left running: they sleep until a time that never
comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """The module `time`, with other clocks."""

    def __init__(self, now: Callable[[], float]):
        self.monotonic = self.time = now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def set_clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float], *modules: ModuleType) -> None:
    """Let modules read the time from `now` until the test ends."""
    for module in modules:
        monkeypatch.setattr(module, "time", Clock(now))
