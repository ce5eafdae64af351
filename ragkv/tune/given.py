"""Questions that a user gives for tuning: JSON lines {"q": "…", "a": ["…"]?}, as `ragkv ask --file` takes them.

The passages that a question is asked about are those that share its rare words: BM25 over the user's own passages.
A question without an answer gets the one that the model gives under full attention, so that no gold is needed.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from ragkv.errors import InputError
from ragkv.evaluation.questions import Asked
from ragkv.tune.contexts import Chunk, Context, TextPassage

Answer = Callable[[Sequence[Chunk], str], str]
"""Answers a question about chunks."""

_WORD = re.compile(r"\w+")
FOUND = 8
"""Best passages of a question; the others of a context are drawn at random."""
OTHERS = 40
"""Most of those."""
ROOM_TO_ASK = 96
"""Tokens of a context that are left for the question and its answer."""


@dataclass(frozen=True)
class GivenQuestion:
    """A question, with its answer or "" if none is known."""

    text: str
    answer: str = ""


def read_questions(path: Path) -> list[GivenQuestion]:
    """Read questions from JSON lines.

    Raises:
        InputError: The file cannot be read; the message names the line.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            answers = row.get("a") or [""]
            found.append(GivenQuestion(str(row["q"]), str(answers[0])))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise InputError(f'{path}, line {number}: not an object like {{"q": "…", "a": ["…"]}}') from None
    if not found:
        raise InputError(f"{path}: there are no questions in it")
    return found


@dataclass(frozen=True)
class GivenSource:
    """Contexts around given questions.

    Attributes:
        given: The questions.
        chunks: All passages, as chunks.
        best: Indices of the best chunks of every question.
        count_tokens: Number of tokens of a chunk in the prompt.
    """

    given: tuple[GivenQuestion, ...]
    chunks: tuple[Chunk, ...]
    best: tuple[tuple[int, ...], ...]
    count_tokens: Callable[[Chunk], int]

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        number = rng.randrange(len(self.given))
        question = self.given[number]
        room, held = tokens - ROOM_TO_ASK, list[int]()
        others = rng.sample(range(len(self.chunks)), min(OTHERS, len(self.chunks)))
        for at in (*self.best[number], *others):
            size = self.count_tokens(self.chunks[at])
            if at not in held and size <= room:
                held.append(at)
                room -= size
        rng.shuffle(held)
        return Context(tuple(self.chunks[at] for at in held), (Asked(question.text, question.answer, -1),))

    def answered(self, answer: Answer, progress: Callable[[str, int, int], None]) -> GivenSource:
        """Return a source in which every question has an answer: its own, or what `answer` says."""
        found = []
        for number, (question, best) in enumerate(zip(self.given, self.best, strict=True), 1):
            text = question.answer or answer([self.chunks[at] for at in best], question.text)
            found.append(replace(question, answer=text))
            progress("answering", number, len(self.given))
        return replace(self, given=tuple(found))


def given_source(
    given: Sequence[GivenQuestion], passages: Sequence[TextPassage], count_tokens: Callable[[Chunk], int]
) -> GivenSource:
    """Rank the passages for every question."""
    best = rank([each.text for each in given], [f"{passage.title} {passage.text}" for passage in passages], FOUND)
    chunks = tuple((passage.title, passage.text) for passage in passages)
    return GivenSource(tuple(given), chunks, tuple(map(tuple, best)), count_tokens)


def rank(questions: Sequence[str], texts: Sequence[str], most: int) -> list[list[int]]:
    """Return the best texts of every question by BM25, best first; texts without a common word are left out."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE VIRTUAL TABLE texts USING fts5(text, content='')")
        connection.executemany("INSERT INTO texts(rowid, text) VALUES (?, ?)", enumerate(texts))
        ranked = []
        for question in questions:
            words = " OR ".join(f'"{word}"' for word in dict.fromkeys(_WORD.findall(question.lower())))
            query = "SELECT rowid FROM texts WHERE texts MATCH ? ORDER BY bm25(texts), rowid LIMIT ?"
            ranked.append([row for (row,) in connection.execute(query, (words, most))] if words else [])
        return ranked
