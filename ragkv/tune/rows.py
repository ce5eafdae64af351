"""Rows of training: one context and its questions, laid out so that one forward pass computes all of them.

    S, S' chunk 1, S' chunk 2, …, question 1 answer 1, question 2 answer 2, …

Every token has the position that it has when the service answers: chunks follow S back to back at their full length,
and every question starts behind the last chunk. A stored chunk was encoded right after S. A copy of S (S') right
before each chunk, at the positions before the chunk's own, gives the chunk the same surroundings at its stitched place:
rotary attention depends on distances alone. Masks (masks.py) decide who sees what.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.model.prompt import Prompt
from ragkv.tune.contexts import Context

PADDING, PREFIX, COPY, CHUNK, QUESTION = range(5)
"""Kinds of tokens. A copy is one of S before a chunk. Answers count as part of their question."""


@dataclass(frozen=True)
class TrainingRow:
    """A row of `T` tokens with `Q` questions over `B` blocks.

    Attributes:
        ids: Token ids, int64 [T].
        positions: Positions, int64 [T].
        kinds: PADDING … QUESTION, int64 [T].
        parts: Number of the token's chunk (copies too) or question, int64 [T].
        blocks: Number of the token's block in the row, int64 [T]; 0 outside of chunks.
        targets: True where the next token belongs to an answer, bool [T].
        kept: True where a question sees a block when its KV is stored, bool [Q, B].
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    kinds: NDArray[np.int64]
    parts: NDArray[np.int64]
    blocks: NDArray[np.int64]
    targets: NDArray[np.bool_]
    kept: NDArray[np.bool_]


@dataclass(frozen=True)
class DropParams:
    """Which blocks a question does not see, in imitation of scout.

    Attributes:
        opening: Blocks at the start of a chunk that are kept with any other of its blocks.
        reuse: Probability that a question sees every block.
        cap: Smallest and largest number of blocks that the question selects, as a share of all blocks.
        answer: Probability that the blocks of the answer are kept.
    """

    opening: int = 1
    reuse: float = 0.4
    cap: tuple[float, float] = (0.05, 0.2)
    answer: float = 0.95


class RowMaker:
    """Turns contexts into rows."""

    def __init__(self, tokenizer: Any, prompt: Prompt, block: int, eos: int, drop: DropParams = DropParams()):
        """Take what the model's prompts are made with.

        Args:
            tokenizer: A fast Hugging Face tokenizer.
            prompt: The prompt of the model.
            block: Tokens of a block.
            eos: Token id that ends an answer.
            drop: Which blocks questions do not see.
        """
        self._tokenizer, self._prompt, self._block, self._eos, self._drop = tokenizer, prompt, block, eos, drop

    def chunk_tokens(self, chunk: tuple[str, str]) -> int:
        """Return the number of tokens that a chunk takes in a row."""
        return len(self._prompt.chunk(*chunk)) + len(self._prompt.prefix)

    def row(self, context: Context, length: int, rng: Random) -> TrainingRow:
        """Lay out a context in `length` tokens. What does not fit is left out, from the end."""
        layout = _Layout(length)
        prefix = self._prompt.prefix
        layout.add(prefix, range(len(prefix)), PREFIX, 0)
        end, blocks = len(prefix), list[tuple[int, ...]]()
        starts = list[int]()
        for number, chunk in enumerate(context.chunks):
            tokens = self._prompt.chunk(*chunk)
            if layout.room < len(prefix) + len(tokens):
                break
            layout.add(prefix, range(end - len(prefix), end), COPY, number)
            starts.append(len(blocks))
            first = len(blocks)
            layout.add(tokens, range(end, end + len(tokens)), CHUNK, number, first, self._block)
            blocks += [tokens[at : at + self._block] for at in range(0, len(tokens), self._block)]
            end += len(tokens)
        kept = list[NDArray[np.bool_]]()
        keeper = _Keeper(blocks, starts, self._drop)
        for asked in context.asked:
            if asked.chunk >= len(starts):
                continue
            question, answer = self._prompt.question(asked.text), (*self._prompt.answer(asked.answer), self._eos)
            tokens = (*question, *answer)
            if layout.room < len(tokens):
                break
            layout.add(tokens, range(end, end + len(tokens)), QUESTION, len(kept))
            layout.mark_answer(len(answer))
            kept.append(keeper.kept(question, self._prompt.answer(asked.answer), rng))
        return layout.row(np.array(kept) if kept else np.zeros((1, max(1, len(blocks))), np.bool_))


class _Layout:
    """A row that grows from the left."""

    def __init__(self, length: int):
        self._at = 0
        self._columns = {name: np.zeros(length, np.int64) for name in ("ids", "positions", "kinds", "parts", "blocks")}
        self._targets = np.zeros(length, np.bool_)

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return len(self._targets) - self._at

    def add(
        self, tokens: Sequence[int], positions: range, kind: int, part: int, first_block: int = 0, block: int = 0
    ) -> None:
        """Append tokens; `block` is the size of their blocks, which are numbered from `first_block`."""
        here = slice(self._at, self._at + len(tokens))
        self._columns["ids"][here] = tokens
        self._columns["positions"][here] = positions
        self._columns["kinds"][here] = kind
        self._columns["parts"][here] = part
        if block:
            self._columns["blocks"][here] = first_block + np.arange(len(tokens)) // block
        self._at += len(tokens)

    def mark_answer(self, tokens: int) -> None:
        """Mark the positions that predict the last `tokens` tokens."""
        self._targets[self._at - tokens - 1 : self._at - 1] = True

    def row(self, kept: NDArray[np.bool_]) -> TrainingRow:
        """Return the row."""
        return TrainingRow(**self._columns, targets=self._targets, kept=kept)


class _Keeper:
    """Chooses the blocks that a question sees: those that share rare tokens with it, and their chunks' openings."""

    def __init__(self, blocks: Sequence[Sequence[int]], starts: Sequence[int], drop: DropParams):
        self._blocks, self._starts, self._drop = blocks, starts, drop
        self._where: dict[int, list[int]] = {}
        for number, tokens in enumerate(blocks):
            for token in set(tokens):
                self._where.setdefault(token, []).append(number)

    def kept(self, question: Sequence[int], answer: Sequence[int], rng: Random) -> NDArray[np.bool_]:
        """Return the blocks that a question sees, bool [B]."""
        count = len(self._blocks)
        if rng.random() < self._drop.reuse or not count:
            return np.ones(max(1, count), np.bool_)
        kept = np.zeros(count, np.bool_)
        scores = np.array([rng.random() for _ in range(count)])  # less than any shared token counts
        for token in set(question):
            found = self._where.get(token, [])
            scores[found] += max(0.0, np.log(count / len(found)) if found else 0.0)
        # A score spreads to the neighbours, because answers continue in the next block.
        scores = scores + 0.5 * (np.append(scores[1:], 0) + np.append(0, scores[:-1]))
        most = max(2, int(rng.uniform(*self._drop.cap) * count))
        kept[np.argsort(-scores)[:most]] = True
        if answer and rng.random() < self._drop.answer:
            kept[self._holding(answer)] = True
        for start, stop in zip(self._starts, [*self._starts, count][1:], strict=True):
            kept[start : min(stop, start + self._drop.opening)] |= kept[start:stop].any()
        return kept

    def _holding(self, answer: Sequence[int]) -> list[int]:
        """Return the blocks with the answer's tokens in a row, searched in every chunk, with what continues them."""
        found = list[int]()
        for start, stop in zip(self._starts, [*self._starts, len(self._blocks)][1:], strict=True):
            flat = [token for block in self._blocks[start:stop] for token in block]
            ends = np.cumsum([len(block) for block in self._blocks[start:stop]]).tolist()
            for at in range(len(flat) - len(answer) + 1):
                if flat[at] == answer[0] and flat[at : at + len(answer)] == list(answer):
                    found += range(start + bisect_right(ends, at), start + bisect_right(ends, at + len(answer) - 1) + 1)
        return found
