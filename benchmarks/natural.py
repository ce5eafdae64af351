"""Natural question sets: prose of many genres, written for this project, in data/natural.

longbench.py reads files in LongBench's format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ragkv.evaluation.sets import GoldSpan, QuestionSet, SetQuestion

NATURAL = Path(__file__).parent / "data" / "natural"


@dataclass(frozen=True)
class SetPage:
    """A natural document: its text in pieces, each of which makes a chunk."""

    id: str
    genre: str
    title: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class SetPageQuestion:
    """A question about natural documents. documents: ids of those that hold the answer, or should."""

    q: str
    a: tuple[str, ...]
    kind: str
    documents: tuple[str, ...]


@cache
def pages(folder: Path = NATURAL) -> tuple[SetPage, ...]:
    """The documents of a natural set: documents*.jsonl."""
    return tuple(
        SetPage(row["id"], row["genre"], row["title"], tuple(row["pieces"]))
        for row in _lines(folder, "documents*.jsonl")
    )


@cache
def page_questions(folder: Path = NATURAL) -> tuple[SetPageQuestion, ...]:
    """The questions of a natural set: questions*.jsonl."""
    return tuple(
        SetPageQuestion(row["q"], tuple(row["a"]), row["kind"], tuple(row["documents"]))
        for row in _lines(folder, "questions*.jsonl")
    )


def natural_sets(chunks: int, seed: int = 1, folder: Path = NATURAL) -> list[QuestionSet]:
    """Return the natural questions, each once, in contexts of exactly `chunks` chunks.

    A context holds the documents that a question needs, whole, and others drawn at random. Documents are in random
    order, the pieces of a document in their own. A question whose documents are in an earlier context shares it.
    """
    rng = random.Random(seed)
    everything = pages(folder)
    by_id = {page.id: page for page in everything}
    contexts: list[tuple[list[SetPage], list[SetPageQuestion]]] = []
    for question in page_questions(folder):
        needed = [by_id[name] for name in question.documents]
        home = next((asked for held, asked in contexts if all(page in held for page in needed)), None)
        if home is None:
            home = []
            contexts.append((_fill(needed, everything, chunks, rng), home))
        home.append(question)
    return [_set(rng.sample(held, len(held)), asked) for held, asked in contexts]


def _fill(needed: Sequence[SetPage], everything: Sequence[SetPage], chunks: int, rng: random.Random) -> list[SetPage]:
    """`needed` and random others with exactly `chunks` pieces; the last one is cut if its pieces do not fit."""
    held, others = list(needed), [page for page in everything if page not in needed]
    room = chunks - sum(len(page.pieces) for page in held)
    for page in rng.sample(others, len(others)):
        if room <= 0:
            break
        held.append(SetPage(page.id, page.genre, page.title, page.pieces[:room]))
        room -= len(held[-1].pieces)
    return held


def _set(held: Sequence[SetPage], asked: Sequence[SetPageQuestion]) -> QuestionSet:
    chunks = [(page.id, page.title, piece) for page in held for piece in page.pieces]
    return QuestionSet(
        tuple((title, text) for _, title, text in chunks),
        tuple(SetQuestion(q.q, q.a, q.kind, _find(chunks, q)) for q in asked),
    )


def _find(chunks: Sequence[tuple[str, str, str]], question: SetPageQuestion) -> GoldSpan | None:
    """Place of the first gold answer, if it occurs exactly once in the question's documents."""
    answer = question.a[0]
    found = [
        GoldSpan(n, text.index(answer), text.index(answer) + len(answer))
        for n, (page, _, text) in enumerate(chunks)
        if page in question.documents and text.count(answer) == 1
    ]
    return found[0] if len(found) == 1 and question.kind != "none" else None


def _lines(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(pattern)):
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
