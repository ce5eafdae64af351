"""How the time of a call grows with its input: processor time of this thread, which a busy machine does not change."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(call: Callable[[], object], runs: int = 3) -> float:
    """Return the least processor time of several runs."""
    least = float("inf")
    for _ in range(runs):
        start = time.thread_time()
        call()
        least = min(least, time.thread_time() - start)
    return least


def grows_linearly(call: Callable[[str], object], text: Callable[[int], str], size: int) -> bool:
    """Whether four times the text takes less than ten times as long. Ten is between the four of a linear function and
    the sixteen of a quadratic one. What takes under 20 ms is not measured: there, noise would decide."""
    small, large = text(size), text(4 * size)
    took = seconds(lambda: call(large))
    return took < 0.02 or took < 10 * seconds(lambda: call(small))
