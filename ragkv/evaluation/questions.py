"""Extractive questions about any prose, made by rules: to tune a reader on a user's documents, and as examples.

A rule that is not sure gives nothing. Some questions need two sentences, some compare two chunks, and some have no
answer in the chunks at all.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.evaluation.drafts import Draft
from ragkv.evaluation.facts import ask, facts
from ragkv.evaluation.hops import bridges, comparisons
from ragkv.evaluation.twists import answers, twist

UNKNOWN = "unknown"
_WEIGHTS = {"when": 6.0, "where": 5.0, "who": 4.0, "agent": 4.0, "count": 3.0, "long": 3.0, "why": 2.0, "identify": 2.0,
            "define": 2.0, "also": 2.0, "object": 2.0, "blank": 1.0, "stands": 0.7, "stranded": 1.0}  # fmt: skip
"""How often a kind of question is taken, next to 1.5 for the others."""


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes:
        text: As a user types it.
        answer: A span of the text of its chunk, "yes", "no", or "unknown".
        chunk: The number of its chunk; -1 if the answer is "unknown".
        kind: "one", "two", "compare", "absent" or "twisted".
    """

    text: str
    answer: str
    chunk: int
    kind: str = "one"


@dataclass(frozen=True)
class QuestionShape:
    """Shares of kinds of questions.

    Attributes:
        unknown: Questions that the chunks do not answer.
        two: Questions that need two sentences, where there are any.
        compare: Questions that compare two chunks, where there are any.
        keyword: Queries as typed into a search box.
        lower: Questions without capitals.
        unmarked: Questions without a question mark.
    """

    unknown: float = 0.12
    two: float = 0.15
    compare: float = 0.05
    keyword: float = 0.12
    lower: float = 0.12
    unmarked: float = 0.15


def questions(
    rng: random.Random, chunks: Sequence[tuple[str, str]], count: int, unseen: Sequence[tuple[str, str]] = (),
    shape: QuestionShape = QuestionShape(),
) -> list[Asked]:  # fmt: skip
    """Different questions about one context.

    Args:
        rng: Decides everything that is left open.
        chunks: Title and text of every chunk of the context.
        count: How many questions to make; there are fewer where the text does not give them.
        unseen: Other chunks. Questions about them have no answer here.
        shape: Shares of the kinds.

    Returns:
        Questions in a random order.
    """
    asked: dict[str, Asked] = {}
    pools = _Pools(rng, chunks, unseen, count)
    for _ in range(count * 4):
        if len(asked) == count:
            break
        found = pools.take(shape)
        if found and found.text.lower() not in asked:
            asked[found.text.lower()] = found
    return _balanced(rng, list(asked.values()), shape.unknown)


_PLAIN = QuestionShape(unknown=0, two=0, compare=0, keyword=0, lower=0, unmarked=0)
_USUAL = re.compile(r"(?:Who|When|Where|Why|How many|How long|What year) ")
"""How a question begins that reads as if a user had typed it."""


def plain_questions(passages: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Simple questions about passages, about as many different ones as there are, the same for the same passages.

    Args:
        passages: Title and text of each.
        count: How many questions to make at most.

    Returns:
        (question, answer), the shortest of each passage first.
    """
    rng, found = random.Random(0), list[list[tuple[str, str]]]()
    for passage in passages:
        made = questions(rng, [passage], _TRIED, shape=_PLAIN)
        usual = [(each.text, each.answer) for each in made if _USUAL.match(each.text)]
        found.append(sorted(usual, key=lambda each: len(each[0])))
    turns = itertools.zip_longest(*found)
    return [each for turn in turns for each in turn if each is not None][:count]


_TRIED = 4
"""Questions that are made of a passage, of which those with a usual beginning are taken."""


def _balanced(rng: random.Random, asked: list[Asked], unknown: float) -> list[Asked]:
    """Leave out questions without an answer until their share is `unknown`: they are easier to make than others."""
    answered = sum(each.answer != UNKNOWN for each in asked)
    room = unknown / (1 - unknown) * answered if unknown < 1 else len(asked)
    room = int(room) + (rng.random() < room % 1)
    kept = []
    for draft in asked:
        room -= draft.answer == UNKNOWN
        if draft.answer != UNKNOWN or room >= 0:
            kept.append(draft)
    return kept


class _Pools:
    """Drafts of every kind that a context gives."""

    def __init__(
        self, rng: random.Random, chunks: Sequence[tuple[str, str]], unseen: Sequence[tuple[str, str]], count: int
    ):
        self._rng, self._texts = rng, [text for _, text in chunks]
        self._low = [f"{title}\n{text}".lower() for title, text in chunks]
        self._read = [facts(title, text) for title, text in chunks]
        order = rng.sample(range(len(chunks)), len(chunks))
        self._one: list[tuple[Draft, int]] = []
        for n in order:
            self._one += [(draft, n) for draft in ask(rng, self._read[n])]
            if len(self._one) > count * 6:
                break
        self._unseen = [d for chunk in rng.sample(unseen, min(len(unseen), 4)) for d in ask(rng, facts(*chunk))]
        self._names = sorted({name for draft, _ in self._one for name in draft.names})
        self._names += sorted({told.name for chunk in self._read for told in chunk.told})
        inside = re.sub(r"[.!?]\s+\w+", "", "\n".join(self._texts))
        self._names = [name for name in self._names if _named(name, inside)]
        self._two = bridges(rng, self._read, self._one)
        self._compare = comparisons(rng, self._read)

    def take(self, shape: QuestionShape) -> Asked | None:
        """One question of a kind that the shape decides."""
        rng, u = self._rng, self._rng.random()
        if u < shape.unknown:
            return self._unknown(shape)
        u = (u - shape.unknown) / max(1e-9, 1 - shape.unknown)
        if u < shape.compare and self._compare:
            text, answer, chunk = rng.choice(self._compare)
            return Asked(text, answer, chunk, "compare")
        if u < shape.compare + shape.two and self._two:
            draft, chunk = rng.choice(self._two)
            return Asked(worded(rng, draft, shape), draft.answer.text, chunk, "two")
        if not self._one:
            return None
        draft, chunk = self._weighed()
        if any(n != chunk and answers(draft, low) for n, low in enumerate(self._low)):
            return None
        return Asked(worded(rng, draft, shape), draft.answer.text, chunk)

    def _weighed(self) -> tuple[Draft, int]:
        weights = [_WEIGHTS.get(draft.rule, 1.5) for draft, _ in self._one]
        return self._rng.choices(self._one, weights)[0]

    def _unknown(self, shape: QuestionShape) -> Asked | None:
        rng = self._rng
        if self._unseen and (rng.random() < 0.5 or not self._one):
            draft = rng.choice(self._unseen)
            if any(answers(draft, low, strict=True) for low in self._low) or (
                draft.rule == "blank" and rng.random() < 0.5
            ):
                return None
            return Asked(worded(rng, draft, shape), UNKNOWN, -1, "absent")
        if not self._one:
            return None
        for _ in range(4):
            draft, _ = self._weighed()
            if draft.rule not in ("entry", "stands", "define", "blank") and (
                new := twist(rng, draft, self._texts, self._names)
            ):
                return Asked(worded(rng, new, shape), UNKNOWN, -1, "twisted")
        return None


def _named(name: str, inside: str) -> bool:
    """Whether a name is no mere first word of a sentence. inside: the texts without such words."""
    return " " in name or any(char.isupper() for char in name[1:]) or f" {name}" in inside


def worded(rng: random.Random, draft: Draft, shape: QuestionShape) -> str:
    """A draft with its last touches: a mark or none, capitals or none, or as keywords."""
    if draft.query and rng.random() < shape.keyword:
        query = re.sub(r"^what (?:is|was|are) ", "", draft.query)
        query = re.sub(r"\b(?:the|a|an|does|did|is|was|are|were) ", "", query) if rng.random() < 0.5 else draft.query
        query = re.sub(r"[.,;?!]+(?=\s|$)", "", query).strip()
        if len(query.split()) > 2:
            return (query.lower() if rng.random() < 0.8 else query).strip()
    text = re.sub(r"\s+", " ", draft.text).strip()
    if rng.random() < shape.lower:
        text = text.lower()
    return text if rng.random() < shape.unmarked else f"{text}?"
