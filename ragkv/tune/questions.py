"""Placeholder until merge."""
from __future__ import annotations
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Asked:
    text: str
    answer: str
    chunk: int


def questions(rng: Random, chunks: Sequence[tuple[str, str]], count: int, absent: Sequence[tuple[str, str]] = ()) -> list[Asked]:
    out = []
    for _ in range(count):
        n = rng.randrange(len(chunks))
        words = re.findall(r"\w+", chunks[n][1]) or ["x"]
        at = rng.randrange(len(words))
        out.append(Asked("What follows " + " ".join(words[max(0, at - 4):at]) + "?", words[at], n))
    return out
