"""Question sets: the chunks of one prompt, and questions about them with gold answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragkv.engine.needles import make_needles


@dataclass(frozen=True)
class GoldSpan:
    """Characters start..end of a chunk's text."""

    chunk: int
    start: int
    end: int


@dataclass(frozen=True)
class SetQuestion:
    """A question with its accepted answers.

    Attributes:
        gold: accepted answers.
        kind: one, coref, two (facts) or none ("unknown"); "" if not stated.
        span: place of the answer, if known.
        language: `zh` is scored by characters.
    """

    text: str
    gold: tuple[str, ...]
    kind: str
    span: GoldSpan | None = None
    language: str = "en"


@dataclass(frozen=True)
class QuestionSet:
    """Chunks, (title, text) in the order of the prompt, and questions about them. name: for messages."""

    chunks: tuple[tuple[str, str], ...]
    questions: tuple[SetQuestion, ...]
    name: str = ""


def needle_sets(
    sets: int, documents: int, tokens: int, questions: int, seed: int, length: Callable[[str], int]
) -> list[QuestionSet]:
    """Generate sets of `documents` documents of about `tokens` tokens, one chunk each. length: counts tokens."""
    made = [make_needles(seed + number, documents, tokens, questions, length) for number in range(sets)]
    return [
        QuestionSet(
            tuple((document.title, document.text) for document in needles.documents),
            tuple(
                SetQuestion(
                    q.question,
                    (q.answer,),
                    q.kind,
                    GoldSpan(next(n for n, d in enumerate(needles.documents) if d.id == q.document_id), q.start, q.end),
                )
                for q in needles.questions
            ),
        )
        for needles in made
    ]
