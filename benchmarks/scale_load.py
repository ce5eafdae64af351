"""The load of the simulated cluster: when each question arrives, over which collection, and which chunks it retrieves.

Collections are popular by Zipf's law, and within a collection its passages are. A passage is a few neighbouring chunks
that a question retrieves together. No chunk is an object: a rank is drawn by rejection-inversion, in constant time and
memory however many ranks there are (W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates from
monotone discrete distributions", ACM TOMACS 6(3), 1996).

    h(x) = x^-s, the weight of rank x;  H(x), its integral from 1 to x
    u is drawn between H(3/2) - 1 and H(n + 1/2), and x is H^-1(u) rounded
    x is accepted if u >= H(x + 1/2) - h(x)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import InputError

Ranks = NDArray[np.int64]
_PART = 50_000
"""Questions that are drawn at once."""


class SimulatedQuestion(NamedTuple):
    """A question of the load.

    Attributes:
        at: When it arrives.
        collection: Number of its collection.
        chunks: Numbers of the chunks that it retrieves, the most relevant first.
        tokens: Tokens of its answer, at least 1.
        work: Its work until the first token over that of the mean question.
    """

    at: float
    collection: int
    chunks: tuple[int, ...]
    tokens: int
    work: float


@dataclass(frozen=True)
class ScaleLoad:
    """What is asked.

    Attributes:
        rate: Questions a second, as a Poisson process.
        questions: Number of questions that are counted.
        warmup: Number of questions before them. They only fill the host tiers.
        collections: Number of collections, all of one size.
        chunks: Number of chunks of all collections together.
        collection_zipf: Exponent of the popularity of collections.
        chunk_zipf: Exponent of the popularity of passages within a collection.
        top_k: Chunks that a question retrieves.
        neighbours: Chunks of a passage.
        answer_tokens: Mean number of tokens of an answer; the numbers are geometric.
        variation: Standard deviation of the work of a question over its mean; 0 makes all equal, 1 exponential.
        seed: Of everything that is drawn.
    """

    rate: float
    questions: int = 100_000
    warmup: int = 300_000
    collections: int = 1000
    chunks: int = 10**8
    collection_zipf: float = 1.0
    chunk_zipf: float = 1.0
    top_k: int = 16
    neighbours: int = 4
    answer_tokens: float = 64.0
    variation: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse a load that cannot be drawn. Raises InputError."""
        if self.rate <= 0 or self.questions < 1 or self.answer_tokens < 1:
            raise InputError("a load has a rate above 0, at least one question, and answers of at least one token")
        if self.passages < -(-self.top_k // self.neighbours):
            raise InputError(
                f"{self.chunks} chunks in {self.collections} collections are {self.passages} passages each, and a "
                f"question retrieves {self.top_k} chunks: give more chunks or fewer collections"
            )

    @property
    def passages(self) -> int:
        """Passages of a collection."""
        return self.chunks // self.collections // self.neighbours

    def drawn(self, count: int, stream: str) -> Iterator[SimulatedQuestion]:
        """Draw questions. The same stream gives the same questions, whatever becomes of them.

        Args:
            count: Number of questions.
            stream: Name of the random numbers.
        """
        draws = _Draws(self, stream)
        for first in range(0, count, _PART):
            yield from draws.part(min(_PART, count - first))


@dataclass
class _Draws:
    """Arrivals, collections, passages, answers and work come from separate streams of random numbers."""

    load: ScaleLoad
    stream: str
    now: float = 0.0
    streams: list[np.random.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        root = np.random.SeedSequence([self.load.seed, *self.stream.encode()])
        self.streams = [np.random.default_rng(each) for each in root.spawn(5)]

    def part(self, count: int) -> Iterator[SimulatedQuestion]:
        """Draw the next questions."""
        load, (arrivals, collections, passages, answers, work) = self.load, self.streams
        at = self.now + np.cumsum(arrivals.exponential(1 / load.rate, count))
        self.now = float(at[-1])
        homes = zipf_ranks(load.collections, load.collection_zipf, count, collections)
        wide = -(-load.top_k // load.neighbours)
        found = zipf_ranks(load.passages, load.chunk_zipf, count * wide, passages).reshape(count, wide)
        found = apart(found, load.passages)
        chunks = (homes[:, None] * load.passages + found)[:, :, None] * load.neighbours + np.arange(load.neighbours)
        tokens = answers.geometric(1 / load.answer_tokens, count)
        shape = 1 / load.variation**2 if load.variation else 0.0
        shares = work.gamma(shape, 1 / shape, count) if shape else np.ones(count)
        rows = chunks.reshape(count, -1)[:, : load.top_k].tolist()
        return map(SimulatedQuestion, at.tolist(), homes.tolist(), map(tuple, rows), tokens.tolist(), shares.tolist())


def zipf_ranks(ranks: int, exponent: float, count: int, random: np.random.Generator) -> Ranks:
    """Draw ranks from 0 on with probabilities proportional to 1 / (rank + 1)^exponent, by rejection-inversion.

    Args:
        ranks: Number of ranks.
        exponent: Exponent of Zipf's law; 0 makes all ranks equal.
        count: Number of draws.
        random: The random numbers.
    """
    low, high = float(_integral(np.array(1.5), exponent)) - 1, float(_integral(np.array(ranks + 0.5), exponent))
    found = np.empty(count, np.int64)
    missing = np.arange(count)
    while len(missing):
        at = low + random.random(len(missing)) * (high - low)
        rank = np.clip(np.rint(_inverse(at, exponent)), 1, ranks)
        accepted = at >= _integral(rank + 0.5, exponent) - rank**-exponent
        found[missing[accepted]] = rank[accepted] - 1
        missing = missing[~accepted]
    return found


def apart(rows: Ranks, ranks: int) -> Ranks:
    """Make the ranks of each row different: one that is there already moves on to the next rank that is not."""
    found = rows.copy()
    for column in range(1, rows.shape[1]):
        while True:
            again = (found[:, :column] == found[:, column : column + 1]).any(axis=1)
            if not again.any():
                break
            found[again, column] = (found[again, column] + 1) % ranks
    return found


def _integral(x: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """H(x): (x^(1-s) - 1) / (1 - s), and log x for s = 1."""
    logs, rest = np.log(x), 1 - exponent
    return logs if abs(rest) < 1e-9 else np.expm1(rest * logs) / rest


def _inverse(at: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """H^-1."""
    rest = 1 - exponent
    return np.exp(at if abs(rest) < 1e-9 else np.log1p(np.maximum(rest * at, -1 + 1e-15)) / rest)
