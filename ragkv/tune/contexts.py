"""Contexts: chunks of one prompt, and questions about them, for rows of training and for the report.

A source makes a context from random numbers alone, so that row n of a training run is the same in every run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, Protocol

from ragkv.errors import InputError
from ragkv.evaluation.questions import Asked, questions

Chunk = tuple[str, str]
"""(title, text)"""

QUESTION_TOKENS = 22
"""Tokens of a question with its answer, about. It decides how many questions a row asks for."""
SMALLEST = 80
"""Room, in tokens, that is not worth filling."""
DRAWS = 3
"""Contexts that are drawn for one, because not every text has facts that the rules of questions understand."""
TRIES = 60
"""Passages that are tried for one context."""


def check_enough(documents: int) -> None:
    """Raise InputError where so many documents are too few to tune with."""
    if documents < 2:
        raise InputError("tuning needs two documents at least: one is kept for the report; name more files")


@dataclass(frozen=True)
class Context:
    """Chunks of one prompt, and questions about them.

    Attributes:
        chunks: (title, text) in the order of the prompt. Chunks of one document are adjacent and in order.
        asked: Questions with their answers.
    """

    chunks: tuple[Chunk, ...]
    asked: tuple[Asked, ...]


class Source(Protocol):
    """Makes contexts."""

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context whose chunks and questions have about `tokens` tokens together, and never more chunks."""
        ...


@dataclass(frozen=True)
class TextPassage:
    """A passage of a document: what becomes a chunk.

    Attributes:
        family: What the document belongs to: a folder or a package. Passages of one family are good distractors.
        document: Id of the document.
        title: Title of the chunk.
        text: Its text.
    """

    family: str
    document: str
    title: str
    text: str


@dataclass(frozen=True)
class ProseParams:
    """How contexts are put together from passages.

    Attributes:
        question_share: Smallest and largest share of a context's tokens that go to questions.
        adjacent: Largest number of adjacent passages of one document.
        family_share: Share of the distractors that come from the family of the first document.
        split: Probability that the passages of a context are split into short pieces.
        words: Smallest and largest number of words of such pieces.
    """

    question_share: tuple[float, float] = (0.08, 0.25)
    adjacent: int = 4
    family_share: float = 0.4
    split: float = 0.5
    words: tuple[int, int] = (50, 130)


class ProseSource:
    """Contexts from passages of other people's prose, with questions made by rules."""

    def __init__(
        self, passages: Sequence[TextPassage], count_tokens: Callable[[Chunk], int], params: ProseParams = ProseParams()
    ):
        """Group the passages by document and family.

        Args:
            passages: Passages of a document are adjacent and in order.
            count_tokens: Number of tokens of a chunk in the prompt.
            params: How contexts are put together.

        Raises:
            InputError: There are no passages.
        """
        if not passages:
            raise InputError("there is no text to tune with; name a folder that has documents")
        self._count, self._params = count_tokens, params
        self._documents = [list(each) for _, each in groupby(passages, lambda p: (p.family, p.document))]
        self._families: dict[str, list[int]] = {}
        for number, document in enumerate(self._documents):
            self._families.setdefault(document[0].family, []).append(number)
        # A long document counts for more, but not in proportion: a handbook must not drown a hundred short texts.
        self._weights = [len(document) ** 0.5 for document in self._documents]

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        asked_share = rng.uniform(*self._params.question_share)
        count = max(1, int(tokens * asked_share / QUESTION_TOKENS))
        room = tokens - count * QUESTION_TOKENS
        best = Context((), ())
        for _ in range(DRAWS):
            groups, absent = self._groups(rng, room)
            chunks = tuple(chunk for group in groups for chunk in group)
            # What does not fit is left out of the row.
            found = Context(chunks, tuple(questions(rng, chunks, 2 * count, absent)))
            best = max(best, found, key=lambda each: len(each.asked))
            if len(best.asked) >= count:
                break
        return best

    def _groups(self, rng: Random, room: int) -> tuple[list[list[Chunk]], list[Chunk]]:
        """Return groups of adjacent chunks for `room` tokens, in random order, and what stands beside them."""
        params, groups, absent = self._params, list[list[Chunk]](), list[Chunk]()
        first = rng.choices(range(len(self._documents)), self._weights)[0]
        family = self._families[self._documents[first][0].family]
        split = rng.random() < params.split
        words = rng.randint(*params.words)
        for attempt in range(TRIES):
            near = attempt and rng.random() < params.family_share
            if attempt:
                first = rng.choice(family) if near else rng.choices(range(len(self._documents)), self._weights)[0]
            document = self._documents[first]
            start = rng.randrange(len(document))
            stop = start + rng.randint(1, params.adjacent if not attempt else 2)
            group = [(p.title, p.text) for p in document[start:stop]]
            absent += [(p.title, p.text) for p in (*document[max(0, start - 1) : start], *document[stop : stop + 1])]
            pieces = [piece for chunk in group for piece in (_pieces(chunk, words) if split else [chunk])]
            kept = []
            for piece in pieces:
                size = self._count(piece)
                if size <= room:
                    kept.append(piece)
                    room -= size
            if kept:
                groups.append(kept)
            if room < SMALLEST:
                break
        rng.shuffle(groups)
        return groups, absent


class Mixture:
    """Contexts from several sources, each with its weight."""

    def __init__(self, sources: Sequence[tuple[Source, float]]):
        """Take (source, weight) pairs."""
        self._sources, self._weights = [source for source, _ in sources], [weight for _, weight in sources]

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        return rng.choices(self._sources, self._weights)[0].context(rng, tokens)


def read_passages(path: Path) -> list[TextPassage]:
    """Read passages from JSON lines with `text`, and optionally `title`, `document` and `package`.

    Raises:
        InputError: The file cannot be read; the message names the line.
    """
    found, number = [], 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                row: dict[str, Any] = json.loads(line)
                title = str(row.get("title", ""))
                document = str(row.get("document", title))
                found.append(TextPassage(str(row.get("package", "")), document, title, row["text"]))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError):
        raise InputError(f"{path}, line {number}: not an object with `text`") from None
    return found


_SENTENCE = re.compile(r"(?<=[.!?][\"”')\s])\s*(?=[A-Z\"“(])|\n\n+")


def _pieces(chunk: Chunk, words: int) -> list[Chunk]:
    """Split a chunk after sentences into pieces of at least `words` words; the last one may be shorter."""
    title, text = chunk
    pieces, current = list[Chunk](), list[str]()
    for sentence in _SENTENCE.split(text):
        if not sentence or not sentence.strip():
            continue
        current.append(sentence.strip())
        if sum(len(each.split()) for each in current) >= words:
            pieces.append((title, " ".join(current)))
            current = []
    if current:
        pieces.append((title, " ".join(current)))
    return pieces
