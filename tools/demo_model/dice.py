"""Random choices, several times faster than those of the standard library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Random choices, fast. lists: the word lists of the banks."""

    def __init__(self, rng: Random, lists: Mapping[str, Sequence[str]]):
        self.rng, self.lists = rng, lists

    def pick(self, kind: str) -> str:
        """A word of a list."""
        words = self.lists[kind]
        return words[int(self.rng.random() * len(words))]

    def one(self, words: Sequence[T]) -> T:
        """Any of `words`; several times faster than random.choice."""
        return words[int(self.rng.random() * len(words))]

    def whole(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return low + int(self.rng.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        """True in this share of calls."""
        return self.rng.random() < share


Make = Callable[[Dice], str]
"""Makes a value."""
