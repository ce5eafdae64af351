"""Segments: what each few bytes of a passage say, in the space of the embedder that embedded the passage.

A segment is the mean of the embedder's token outputs over `SEGMENT_BYTES` bytes of a chunk's text. These outputs come
from the pass that embeds the whole passage, title included, so a segment that says "she" knows who is meant ("late
chunking", Günther et al., 2024), and ingest runs no second pass. Segments depend on the embedder and the text alone: no
language model, tokenizer or block size changes them.

Stored as int8. Only the direction of a segment matters, so the largest number of each becomes 127.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ragkv.types import SEGMENT_BYTES

WINDOW_BYTES = 256
"""Bytes of a window that is embedded for itself, where an embedder gives no outputs of tokens."""

Segments = NDArray[np.int8]
"""Directions of the segments of a passage [S, dimension]."""


def segment_count(size: int) -> int:
    """Return the number of segments of a text of `size` bytes, at least 1."""
    return max(1, -(-size // SEGMENT_BYTES))


def pool_tokens(
    outputs: NDArray[np.float32], starts: NDArray[np.int64], size: int, whole: NDArray[np.float32]
) -> Segments:
    """Pool the outputs of tokens to segments.

    Args:
        outputs: Outputs of tokens [m, dimension].
        starts: The byte of the text that each token begins at [m]; -1 for a token outside the text.
        size: Bytes of the text.
        whole: Vector of the passage [dimension], for a segment in which no token begins.
    """
    count = segment_count(size)
    sums = np.zeros((count, outputs.shape[1]), np.float32)
    inside = (starts >= 0) & (starts < max(1, size))
    np.add.at(sums, starts[inside] // SEGMENT_BYTES, outputs[inside])
    empty = ~sums.any(axis=1)
    sums[empty] = whole
    return quantise(sums)


def quantise(vectors: NDArray[np.float32]) -> Segments:
    """Return the directions of vectors [n, dimension] as int8."""
    largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    rounded: Segments = np.rint(vectors * (127 / largest)).astype(np.int8)
    return rounded


def embed_windows(
    encode: Callable[[Sequence[str]], NDArray[np.float32]], passages: Sequence[tuple[str, str]]
) -> tuple[Segments, ...]:
    """Embed windows of the texts, each behind its title, and let every segment of a window have its vector.

    For embedders that give no outputs of tokens. This reads each text twice in all.

    Args:
        encode: Embeds texts: unit vectors [n, dimension].
        passages: Each a title and a text.
    """
    texts, counts = list[str](), list[int]()
    for title, text in passages:
        data = text.encode()
        starts = range(0, max(1, len(data)), WINDOW_BYTES)
        texts += [f"{title}\n{data[start : start + WINDOW_BYTES].decode(errors='ignore')}" for start in starts]
        counts.append(len(starts))
    windows, found = quantise(encode(texts)), list[Segments]()
    ends = np.cumsum(counts).tolist()
    for (_, text), count, end in zip(passages, counts, ends, strict=True):
        repeated = windows[end - count : end].repeat(WINDOW_BYTES // SEGMENT_BYTES, axis=0)
        found.append(repeated[: segment_count(len(text.encode()))])
    return tuple(found)


def cut_windows(text: str, size: int) -> list[str]:
    """Split `text` into windows of at most `size` characters, at spaces where possible."""
    if len(text) <= size:
        return [text]
    windows, start = [], 0
    while len(text) - start > size:
        space = text.rfind(" ", start + size // 2, start + size)
        end = space + 1 if space > 0 else start + size
        windows.append(text[start:end])
        start = end
    return [*windows, text[start:]]
