"""Finds the evidence of a question in retrieved chunks: the glue between texts and `recompute/evidence.py`.

The windows of blocks are ranges of bytes of a chunk's text. Segments that the catalogue keeps are pooled over them, and
the question's words are looked for in them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ragkv.model.prompt import Prompt
from ragkv.normalisation import RUN, UNSPACED, fold_with_offsets, numbers, searchable
from ragkv.passages import byte_offsets
from ragkv.recompute.evidence import BlockEvidence
from ragkv.types import SEGMENT_BYTES, Chunk, Hit

MOST_WORDS = 64
"""Words of a question that are looked for; a longer question has its first ones."""
MOST_KNOWN = 4096
"""Chunks whose windows are kept: a kilobyte each."""
STEM = 5
"""Letters by which words are compared, so that `built` and `builds`, or `bridge` and `bridges`, are the same."""

_WORD = re.compile(r"\w+")


class SegmentFinder(Protocol):
    """The part of `ragkv.retrieval.Retriever` that evidence needs."""

    def question_vector(self, question: str) -> NDArray[np.float32]: ...

    def segments(self, hits: Sequence[Hit]) -> list[NDArray[np.int8]]: ...


class EvidenceFinder:
    """Finds evidence in chunks that one model reads. Holds no request state; one thread at a time uses it."""

    def __init__(self, finder: SegmentFinder, prompt: Prompt, block: int, device: torch.device | str = "cpu"):
        """Set up the finder.

        Args:
            finder: Knows the segments of chunks, and embeds questions.
            prompt: Places tokens in texts.
            block: Tokens of a block.
            device: Compares windows with questions.
        """
        self._finder, self._prompt, self._block, self._device = finder, prompt, block, device
        self._known: OrderedDict[tuple[int, ...], NDArray[np.float64]] = OrderedDict()

    def find(self, question: str, hits: Sequence[Hit]) -> list[BlockEvidence]:
        """Return the evidence in the chunk of each hit. Raises ModelNotFound: the embedder cannot be loaded."""
        bounds = [self._windows(hit.chunk) for hit in hits]
        vector = self._finder.question_vector(question)
        meaning = window_scores(self._finder.segments(hits), bounds, vector, self._device)
        sought = question_words(question)
        return [
            BlockEvidence(mine, find_words(sought, hit.chunk, bound))
            for mine, hit, bound in zip(meaning, hits, bounds, strict=True)
        ]

    def _windows(self, chunk: Chunk) -> NDArray[np.float64]:
        """Return first and last byte of the window of each block [2, B], in the text of the chunk."""
        if chunk.tokens in self._known:
            self._known.move_to_end(chunk.tokens)
            return self._known[chunk.tokens]
        ends = self._prompt.token_ends(chunk.title, chunk.text, chunk.tokens)
        last = np.append(ends[self._block - 1 : -1 : self._block], ends[-1])
        first = np.concatenate([[0.0], last[:-1]])
        windows = np.stack([np.append(first[:1], first[:-1]), np.append(last[1:], last[-1:])])
        self._known[chunk.tokens] = np.clip(windows, 0.0, len(chunk.text.encode()))
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return self._known[chunk.tokens]


def as_hits(chunks: Sequence[tuple[str, str]], tokens: Sequence[tuple[int, ...]]) -> list[Hit]:
    """Return chunks, each a title and a text, with their token ids, as retrieval would return them."""
    pairs = enumerate(zip(chunks, tokens, strict=True))
    return [Hit(Chunk(f"#{i}", "", i, title, text, ids), 0.0, i) for i, ((title, text), ids) in pairs]


def window_scores(
    segments: Sequence[NDArray[np.int8]],
    bounds: Sequence[NDArray[np.float64]],
    question: NDArray[np.float32],
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Compare windows of several texts with a question.

    Args:
        segments: Segments of each text.
        bounds: Of each text, first and last byte of each of its windows [2, W].
        question: Unit vector of the question [dimension].
        device: Computes.

    Returns:
        For each text the cosine of the question and each window [W] float32, on the CPU. A window is the sum of its
        segments, each with the share of it that is in the window.
    """
    counts, sizes = [len(each) for each in segments], [bound.shape[1] for bound in bounds]
    rows = F.normalize(torch.from_numpy(np.concatenate(segments)).to(device).float(), dim=1)
    count = np.repeat(counts, sizes)
    first, last = np.clip(np.concatenate(bounds, axis=1) / SEGMENT_BYTES, 0, count)
    begin = np.minimum(first.astype(np.int64), count - 1)
    # Of every window the segments from the one it begins in, and how much of each is inside of it [sum of W, most].
    numbers = begin[:, None] + np.arange(1 + int((np.ceil(last) - begin).max(initial=0)))
    inside = (np.minimum(numbers + 1, last[:, None]) - np.maximum(numbers, first[:, None])).clip(min=0)
    starts = np.repeat(np.cumsum([0, *counts[:-1]]), sizes)
    at = torch.from_numpy(np.minimum(starts[:, None] + numbers, len(rows) - 1)).to(device)
    weights = torch.from_numpy(inside.astype(np.float32)).to(device)
    windows = F.embedding_bag(at, rows, per_sample_weights=weights, mode="sum")
    cosines = (F.normalize(windows, dim=1) @ torch.from_numpy(question).to(device)).cpu()
    return list(cosines.split(sizes))


def question_words(question: str) -> tuple[str, ...]:
    """Return what is looked for: the beginnings of words, and pairs of characters of scripts without spaces."""
    words = list[str]()
    for run in (run for word in _WORD.findall(searchable(question).lower()) for run in RUN.findall(word)):
        pairs = [run[i : i + 2] for i in range(max(1, len(run) - 1))]
        words += pairs if UNSPACED.match(run) else [run[:STEM]]
    return tuple(dict.fromkeys(words))[:MOST_WORDS]


def find_words(words: Sequence[str], chunk: Chunk, windows: NDArray[np.float64]) -> Tensor:
    """Return which words stand in each window, or in the title [B, W] bool.

    Args:
        words: As `question_words` returns them.
        chunk: The chunk.
        windows: First and last byte of each window [2, B].
    """
    present = np.zeros((windows.shape[1], len(words)), bool)
    numeric = any(map(str.isdigit, words))
    (text, offsets), (title, _) = _searched(chunk.text, numeric), _searched(chunk.title, numeric)
    for number, word in enumerate(words):
        places = np.asarray(_places(text, word), np.int64)
        if _places(title, word):
            present[:, number] = True
        elif len(places):
            at = places if offsets is None else np.sort(offsets[places])
            behind = np.searchsorted(at, windows[1], "left")
            present[:, number] = behind > np.searchsorted(at, windows[0], "left")
    return torch.from_numpy(present)


def _searched(text: str, numeric: bool) -> tuple[str, NDArray[np.int64] | None]:
    """Return what words are looked for in, and the byte of the text that each of its characters stands for.

    numeric: Whether numbers are looked for. Those in groups stand in one piece behind the text.
    """
    read, stands = fold_with_offsets(text)
    grouped = list(numbers(read)) if numeric else []
    if text.isascii() and not grouped:
        return _lower(read), None
    begins = byte_offsets(text) if stands is None else byte_offsets(text)[stands]
    pieces = [np.full(len(figures) + 1, begins[at]) for at, figures in grouped]
    return _lower("".join([read, *(f" {figures}" for _, figures in grouped)])), np.concatenate([begins[:-1], *pieces])


def _lower(text: str) -> str:
    """Return a text in lower case with as many characters."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(mark if len(mark.lower()) > 1 else mark.lower() for mark in text)


def _places(text: str, word: str) -> list[int]:
    """Return where a word begins, or a pair of characters stands, in order."""
    inside, found, at = bool(UNSPACED.match(word)), list[int](), text.find(word)
    while at >= 0:
        before = text[at - 1 : at]
        if inside or not before.isalnum() or UNSPACED.match(before):
            found.append(at)
        at = text.find(word, at + 1)
    return found
