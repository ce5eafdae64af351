"""A load of questions over documents, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from benchmarks.load import draw


@dataclass(frozen=True)
class LoadedQuestion:
    """A question of a load.

    Attributes:
        at: when it arrives, in seconds after the start.
        documents: numbers of the documents that it is asked over, in order.
        tokens: token ids of the question.
    """

    at: float
    documents: tuple[int, ...]
    tokens: tuple[int, ...]


def poisson_load(rate: float, count: int, documents: int, each: int, question: Sequence[int]) -> list[LoadedQuestion]:
    """Return questions with Poisson arrivals over documents that are drawn by Zipf's law.

    Args:
        rate: questions a second.
        count: number of questions.
        documents: number of documents.
        each: documents of a question.
        question: token ids; each question has them in another order.
    """
    random = Random(f"{rate} {count}")
    arrivals = accumulate(random.expovariate(rate) for _ in range(count))
    drawn = draw(documents, count, each, 1.0, random.getrandbits(32))  # another load asks over others
    return [
        LoadedQuestion(at, numbers, tuple(random.sample(question, len(question))))
        for at, numbers in zip(arrivals, drawn, strict=True)
    ]


def in_time(times: Sequence[float], limit: float) -> float:
    """Return the share of the times that are below a limit."""
    return sum(time < limit for time in times) / len(times)
