"""The load of `ragkv bench serve` as data: when each question arrives, what it asks, and over which documents.

A load is drawn from a seed before anything is asked, so that every method gets the same one. Arrivals, documents and
questions are drawn from separate streams of random numbers: another rate asks the same questions.

    poisson     arrivals with exponential gaps, independent of the answers (open loop)
    trace       arrivals at the times that a file names (open loop)
    closed      no arrivals: the next question is asked when an answer has ended
    popularity  the document of rank r is drawn with a probability proportional to 1 / r^s (Zipf)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random
from typing import Any

from ragkv.errors import InputError

QUOTED_WORDS = 8
"""Consecutive words of a chunk that a generated question quotes."""
MAX_DOCUMENTS = 64
"""Largest number of values that the service takes in a filter."""


@dataclass(frozen=True)
class PlannedQuestion:
    """A question of the load.

    Attributes:
        text: The question.
        documents: Ids of the documents that it is asked over; empty searches the whole collection.
        at: When it arrives, in seconds after the start; None in a closed loop.
    """

    text: str
    documents: tuple[str, ...] = ()
    at: float | None = None


def arrive(questions: Sequence[PlannedQuestion], rate: float, seed: int) -> tuple[PlannedQuestion, ...]:
    """Return the questions with Poisson arrivals, `rate` a second."""
    random = Random(f"{seed} arrivals")
    times = accumulate(random.expovariate(rate) for _ in questions)
    return tuple(replace(question, at=at) for question, at in zip(questions, times, strict=True))


def zipf_shares(count: int, exponent: float) -> list[float]:
    """Return the probability of each rank; the exponent 0 makes all equal."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


def draw(items: int, number: int, each: int, exponent: float, seed: int) -> list[tuple[int, ...]]:
    """Draw items by their popularity. Which item has which rank is drawn from the seed, too.

    Args:
        items: Number of items.
        number: Number of draws.
        each: Different items of a draw, drawn one after another without replacement.
        exponent: Exponent of Zipf's law.
        seed: Of the random numbers.

    Returns:
        Indices of items, in the order in which they were drawn.

    Raises:
        InputError: A draw needs more items than there are.
    """
    if each > items:
        raise InputError(f"a question over {each} documents needs as many, there are {items}")
    random = Random(f"{seed} documents")
    ranked = random.sample(range(items), items)
    shares = zipf_shares(items, exponent)
    found = []
    for _ in range(number):
        # Exponential clocks: the first to ring are a weighted draw without replacement.
        rings = [-log(1.0 - random.random()) / share for share in shares]
        first = nsmallest(each, range(items), key=rings.__getitem__)
        found.append(tuple(ranked[rank] for rank in first))
    return found


def quoting_questions(chunks: Sequence[Sequence[str]], seed: int) -> list[str]:
    """Make a question for each sequence of chunks: it quotes a few words of one of them.

    Args:
        chunks: For each question the texts of its document's chunks, at least one.
        seed: Of the choice of chunk and words.
    """
    random = Random(f"{seed} questions")
    found = []
    for texts in chunks:
        words = random.choice(texts).split()
        start = random.randrange(max(1, len(words) - QUOTED_WORDS + 1))
        found.append(f'What does the text say about "{" ".join(words[start : start + QUOTED_WORDS])}"?')
    return found


def repeat(questions: Sequence[PlannedQuestion], count: int, exponent: float, seed: int) -> list[PlannedQuestion]:
    """Return `count` of the questions: in their order, again from the first, or drawn by popularity if `exponent`."""
    if exponent:
        return [questions[drawn] for (drawn,) in draw(len(questions), count, 1, exponent, seed)]
    return [questions[i % len(questions)] for i in range(count)]


def read_questions(path: Path) -> list[PlannedQuestion]:
    """Read lines {"question": text, "documents": [id, …]?, "at": seconds?} of a JSONL file.

    Raises:
        InputError: The file cannot be read, a line is something else, only some lines have `at`, or it decreases.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    found = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{path}: there are no questions in it")
    times = [question.at for question in found if question.at is not None]
    if times and (len(times) < len(found) or times != sorted(times)):
        raise InputError(f'{path}: either every line has "at" or none, and it never decreases')
    return found


def _parse(line: str, place: str) -> PlannedQuestion:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON ({error})") from None
    if not isinstance(item, dict) or not isinstance(item.get("question"), str):
        raise InputError(f'{place}: a line is {{"question": text, "documents": [id, …]?, "at": seconds?}}')
    documents, at = item.get("documents", []), item.get("at")
    if not isinstance(documents, list) or not all(isinstance(id, str) for id in documents):
        raise InputError(f'{place}: "documents" must be a list of ids')
    if len(documents) > MAX_DOCUMENTS:
        raise InputError(f"{place}: {MAX_DOCUMENTS} documents at most")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not at >= 0):
        raise InputError(f'{place}: "at" must be a number of seconds')
    return PlannedQuestion(item["question"], tuple(documents), at)


def distinguishing_key(metadata: Sequence[Mapping[str, Any]]) -> str:
    """Return the first metadata key, in alphabetical order, with another text or integer in every document.

    Raises:
        InputError: There is none.
    """
    shared = set.intersection(*(set(each) for each in metadata)) if metadata else set()
    for key in sorted(shared):
        values = [each[key] for each in metadata]
        if all(type(value) in (str, int) for value in values) and len(set(values)) == len(values):
            return key
    raise InputError(
        "a question is asked over some documents by a filter, so their metadata needs a key whose value is another one "
        'in each document; ingest them with, for example, "metadata": {"name": "…"}'
    )
