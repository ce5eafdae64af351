"""The project's generator (tools/demo_model) as a source of contexts for tuning."""

from __future__ import annotations

from random import Random

from ragkv.evaluation.questions import Asked
from ragkv.tune.contexts import Context
from tools.demo_model.near import Near
from tools.demo_model.rows import MOST_CHUNKS, PIECE_TOKENS, RowMaker
from tools.demo_model.shape import Shape
from tools.demo_model.task import Author

QUESTION_TOKENS = 22
MARGIN = 0.96
"""Share of the room that is filled with text: a row has a copy of S before each chunk, too."""


class GeneratorSource:
    """Contexts of invented documents in pieces, with questions over one and two facts and without an answer."""

    def __init__(self, maker: RowMaker, shape: Shape, near: Near | None = None):
        """Take the generator's own row maker, which measures text, and how contexts are shaped."""
        self._maker, self._shape, self._near = maker, shape, near

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        from tools.demo_model.bank import load

        count = int(tokens * rng.uniform(0.15, 0.35) / QUESTION_TOKENS) + 1
        room = int((tokens - count * QUESTION_TOKENS) * MARGIN) - 8
        sizes = [size for size in PIECE_TOKENS if room / MOST_CHUNKS <= size * 1.15 and size * 2 <= room]
        author = Author(rng, load(), self._shape, self._near)
        kept = self._maker.stories(author, room, rng.choice(sizes or PIECE_TOKENS[:1]))
        if not kept:
            return self.context(rng, tokens)
        found = author.arrange(kept, 2 * count)
        return Context(found.chunks, tuple(Asked(each.text, each.answer, each.chunk) for each in found.asked))
