"""Rankings of chunks: fused, without copies, and compared with a question (retriever.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ragkv.normalisation import folded
from ragkv.types import Chunk


def best_texts(
    ranked: Sequence[tuple[int, float]], load: Callable[[Sequence[int]], Mapping[int, Chunk]], most: int
) -> tuple[list[tuple[int, float]], dict[int, Chunk], bool]:
    """Load ranked chunks until so many have different texts: to load all takes longer than to find them.

    Texts that differ in white space, case and what search does not tell apart are the same. Those that differ in a
    figure are not. A chunk that was deleted after the search takes no place; the next one does.

    Args:
        ranked: (row, score), best first.
        load: Returns those chunks of some rows that are there.
        most: How many are wanted.

    Returns:
        (row, score) of at most so many chunks with different texts, best first; the loaded chunks; whether all that
        were looked for are there.
    """
    best, chunks, seen = dict[str, tuple[int, float]](), dict[int, Chunk](), 0
    while len(best) < most and seen < len(ranked):
        part = ranked[seen : 2 * seen or most]  # twice as many where copies took all: few loads, whatever there is
        chunks |= load([row for row, _ in part])
        seen += len(part)
        for row, score in part:
            if row in chunks:
                best.setdefault(" ".join(folded(chunks[row].text).casefold().split()), (row, score))
    return list(best.values())[:most], chunks, len(chunks) == seen


def similarity(question: NDArray[np.float32], chunk: NDArray[np.float32] | None) -> float:
    """Return the cosine of two unit vectors [dimension]; 0.0 for a chunk that was removed meanwhile."""
    return 0.0 if chunk is None or chunk.shape != question.shape else float(question @ chunk)


def fuse(lists: Sequence[Sequence[int]], rank_constant: int) -> list[tuple[int, float]]:
    """Fuse rankings by reciprocal rank fusion.

    Args:
        lists: Rankings of rows, best first.
        rank_constant: The constant k.

    Returns:
        (row, score) of every row, best first; score = sum over the lists of 1 / (k + rank), ranks from 1.
    """
    scores: dict[int, float] = {}
    for ranked in lists:
        for rank, row in enumerate(ranked, start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (rank_constant + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
