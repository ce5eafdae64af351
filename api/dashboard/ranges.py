"""The range of time that the overview shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicegui.element import Element
from nicegui.events import GenericEventArguments

CHOICES = ((0, "since the start"), (86400, "day"), (3600, "hour"), (300, "five minutes"))
"""(seconds, label) of the ranges that end now; 0 means since the start."""


@dataclass(frozen=True)
class TimeRange:
    """A range of time.

    Attributes:
        seconds: Its length, if it ends now; 0 means since the start.
        start: Unix seconds of its beginning, if it does not end now; else None.
        end: Unix seconds of its end.
    """

    seconds: float = 0.0
    start: float | None = None
    end: float = math.inf

    @property
    def whole(self) -> bool:
        """Whether it is the time since the start."""
        return self.start is None and not self.seconds

    def moments(self) -> tuple[float, float]:
        """Return its beginning and end, in Unix seconds."""
        if self.start is not None:
            return self.start, self.end
        return (time.time() - self.seconds if self.seconds else 0.0), math.inf


def read_range(value: Any) -> TimeRange:
    """Read what range.js sends: [seconds], or [start, end]. Anything else is the time since the start."""
    numbers = value if isinstance(value, list) else []
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return TimeRange()
    if len(numbers) == 2:
        return TimeRange(start=numbers[0], end=numbers[1])
    return TimeRange(max(0.0, numbers[0])) if numbers else TimeRange()


class RangeChoice(Element, component="range.js"):
    """Buttons for the recent ranges, and two fields for any other."""

    def __init__(self, on_chosen: Callable[[TimeRange], Any]):
        super().__init__()
        self._props["choices"] = [list(choice) for choice in CHOICES]

        def pass_on(event: GenericEventArguments) -> Any:
            return on_chosen(read_range(event.args))

        self.on("chosen", pass_on)
