"""Training rows: a context and as many questions with answers as fit, in the prompt that the service builds.

    prefix, chunk, chunk, …, question part, " answer", </s>, question part, …

Row n of a stage depends on (seed, stage, n) alone, so the data do not depend on the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ragkv.model.prompt import Prompt
from tools.demo_model.bank import load
from tools.demo_model.near import Near
from tools.demo_model.shape import Shape
from tools.demo_model.story import Story
from tools.demo_model.task import Author, Context
from tools.demo_model.team import Team

PADDING, CONTEXT, ANSWER = 0, 1, 2
WORDS_PER_TOKEN = 0.68  # estimate for the generated text, used to choose its length
QUESTION_TOKENS = 21
PIECE_TOKENS = (70, 110, 160, 230, 320, 400, 470)
LONGEST_PIECE = 500  # tokens, wrapper included
MOST_CHUNKS = 24


@dataclass(frozen=True)
class Row:
    """A row: token ids [length], and PADDING, CONTEXT or ANSWER for each of them [length]."""

    ids: NDArray[np.int64]
    weights: NDArray[np.uint8]


class RowMaker:
    """Turns contexts into rows."""

    def __init__(self, tokenizer: Any, prompt: Prompt, shape: Shape, near: Near | None = None):
        self._encode = tokenizer.backend_tokenizer.encode_batch
        self._eos, self._pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self._prompt, self._shape, self._banks, self._near = prompt, shape, load(), near
        Author(Random(0), self._banks, shape)  # loads banks and pages before worker processes are forked

    def row(self, rng: Random, length: int) -> Row:
        """One row of `length` tokens."""
        questions = int(length * rng.uniform(0.15, 0.35) / QUESTION_TOKENS) + 1
        room = length - questions * QUESTION_TOKENS - 8
        pieces = [size for size in PIECE_TOKENS if room / MOST_CHUNKS <= size * 1.15 and size * 2 <= room]
        piece = rng.choice(pieces or PIECE_TOKENS[:1])
        author = Author(rng, self._banks, self._shape, self._near)
        kept = self.stories(author, room, piece)
        return self._pack(author.arrange(kept, 2 * questions), length) if kept else self.row(rng, length)

    def stories(self, author: Author, room: int, piece: int) -> list[Story]:
        """Documents in pieces of about `piece` tokens that nearly fill `room` tokens."""
        made = author.stories(int(1.2 * room * WORDS_PER_TOKEN), int(piece * WORDS_PER_TOKEN), MOST_CHUNKS)
        texts = [self._prompt.chunk_text(story.title, text) for story in made for text in story.pieces]
        sizes = iter([len(e.ids) for e in self._encode(texts, add_special_tokens=False)])
        kept = []
        for story in made:
            own = [next(sizes) for _ in story.pieces]
            if sum(own) <= room and max(own) <= LONGEST_PIECE:
                kept.append(story)
                room -= sum(own)
        return kept

    def _pack(self, context: Context, length: int) -> Row:
        texts = [self._prompt.chunk_text(title, text) for title, text in context.chunks]
        for asked in context.asked:
            texts += [self._prompt.question_text(asked.text), f" {asked.answer}"]
        parts = [e.ids for e in self._encode(texts, add_special_tokens=False)]
        at = len(context.chunks)
        ids = [*self._prompt.prefix, *(token for part in parts[:at] for token in part)]
        weights = [CONTEXT] * len(ids)
        for question, answer in zip(parts[at::2], parts[at + 1 :: 2], strict=True):
            if len(ids) + len(question) + len(answer) + 1 > length:
                break
            ids += [*question, *answer, self._eos]
            weights += [CONTEXT] * len(question) + [ANSWER] * (len(answer) + 1)
        row = Row(np.full(length, self._pad, np.int64), np.zeros(length, np.uint8))
        row.ids[: len(ids)], row.weights[: len(ids)] = ids, weights
        return row


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batch n of a stage: rows of one length from the stage's mix, or this process's part of them."""

    def __init__(self, maker: RowMaker, lengths: list[int], tokens: int, seed: int, team: Team):
        """lengths: row length of each batch, in order. tokens: tokens of a batch over all processes."""
        self._maker, self._lengths, self._tokens, self._seed, self._team = maker, lengths, tokens, seed, team

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64, weights uint8), both [rows, length]."""
        length = self._lengths[n]
        count = max(self._team.size, self._tokens // length)
        mine = range(self._team.rank, count, self._team.size)
        rows = [self._maker.row(Random(f"{self._seed}/{n}/{i}"), length) for i in mine]
        return torch.from_numpy(np.stack([r.ids for r in rows])), torch.from_numpy(np.stack([r.weights for r in rows]))
