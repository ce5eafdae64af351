"""Generated documents (engine/needles.py) as a source of contexts."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ragkv.engine.needles import make_needles
from ragkv.errors import InputError
from ragkv.evaluation.questions import Asked
from ragkv.tune.contexts import QUESTION_TOKENS, Context

MARGIN = 0.8
"""Share of the room that is filled: prompt pieces and titles come on top of what is asked for."""
FEWEST_TOKENS = 120
"""Tokens of the shortest document."""


class NeedleSource:
    """Contexts of invented documents with one planted answer a question."""

    def __init__(self, length: Callable[[str], int]):
        """Take the function that counts the tokens of a text."""
        self._length = length

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        count = max(1, int(tokens * rng.uniform(0.15, 0.3) / QUESTION_TOKENS))
        room = int((tokens - count * QUESTION_TOKENS) * MARGIN)
        documents = rng.randint(1, max(1, min(12, room // FEWEST_TOKENS)))
        made, size = None, max(FEWEST_TOKENS, room // documents)
        while made is None:
            try:
                made = make_needles(rng.randrange(2**31), documents, size, count, self._length)
            except InputError:  # so short a text does not hold so many answers
                count = max(1, count // 2)
        places = {document.id: number for number, document in enumerate(made.documents)}
        asked = tuple(Asked(each.question, each.answer, places[each.document_id]) for each in made.questions)
        return Context(tuple((each.title, each.text) for each in made.documents), asked)
