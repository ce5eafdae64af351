"""Cut documents into chunks of even size that end at a pause of the text and fit the model's chunk size.

    atoms    the splitter cuts the text into small pieces: at paragraphs, then sentences, then words
    pack     atoms are joined to as few chunks as fit, of about the same size; each cut is at the strongest pause near
             the even position, and never right after a heading
    exact    the size of a chunk is that of its real prompt piece, wrapper included; the sums over atoms only guide the
             search

A document that fits into one chunk is left whole. Counting the tokens of atoms and adding them up is about five times
faster than letting the splitter call the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from ingest.progress import IngestStep, run_to_end
from ragkv.errors import ConfigError, InvalidDocument
from ragkv.passages import locate
from ragkv.types import Chunk, Document

SECTION = 32768
"""Characters given to the splitter at once. Its worst cases (no spaces, no sentences) are quadratic."""
TITLE_SHARE = 0.25
"""Share of a chunk's tokens that its title may take. A longer title is shortened."""
FILL = 0.9
"""Share of the limit that a planned chunk fills. The rest leaves a choice of pauses."""
LEAST_ROOM = 16
"""Fewest tokens of text that a chunk must have room for."""

CHARS_OF_ONE = 6
"""Characters for each token of room up to which a document is tried as one chunk. English has about four a token."""

# The cost of a cut at each place, as the share of a chunk's size by which the cut may be moved to avoid it.
_PARAGRAPH, _LINE, _SENTENCE, _WORD, _MIDST, _AFTER_HEADING = 0.0, 0.15, 0.25, 0.6, 1.0, 2.0
_ENDS = ".!?…:;。！？"
_CLOSERS = "\"'”’»)]*_"
_WIDE_ENDS = "。！？"
_NEAR = 256
"""Characters around a cut that are examined."""


class PromptPiece(Protocol):
    """The part of ragkv.model.prompt.Prompt that chunking needs."""

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        """Return the token ids of wrapper, title and text."""
        ...


def split(document: Document, prompt: PromptPiece, limit: int) -> list[Chunk]:
    """Split a document without a pause. See `split_steps`."""
    return run_to_end(split_steps(document, prompt, limit))


def split_steps(document: Document, prompt: PromptPiece, limit: int) -> Generator[IngestStep, None, list[Chunk]]:
    """Split a document into its chunks, in order. Their texts together hold everything but white space.

    Args:
        document: The document.
        prompt: Makes the prompt piece of a chunk.
        limit: Most tokens of a chunk.

    Yields:
        A `split` step, in characters, after each section of the text.

    Raises:
        InvalidDocument: The document has no text.
        ConfigError: `limit` leaves no room for text.
    """
    title = _short_title(document, prompt, limit)
    room = limit - len(prompt.chunk(title, ""))
    if room < LEAST_ROOM:
        raise ConfigError(f"chunk_tokens {limit} leaves {room} tokens for text, {LEAST_ROOM} are needed; raise it")
    pieces = yield from _pieces(document, prompt, title, room, limit)
    ids: dict[int, int] = {}
    chunks: list[Chunk] = []
    for text, tokens in pieces:
        # One object per distinct id instead of one per token: 8 bytes a token instead of 36.
        shared = tuple(map(ids.setdefault, tokens, tokens))
        ordinal = len(chunks)
        chunks.append(Chunk(f"{document.id}#{ordinal}", document.id, ordinal, title, text, shared))
    if not chunks:
        raise InvalidDocument(f"document {document.id!r} is empty")
    spans = list(locate(document, [chunk.text for chunk in chunks]))
    return [replace(chunk, span=span) for chunk, span in zip(chunks, spans, strict=True)]


def _pieces(
    document: Document, prompt: PromptPiece, title: str, room: int, limit: int
) -> Generator[IngestStep, None, Iterable[tuple[str, tuple[int, ...]]]]:
    """Return (text, tokens) of each chunk. A document that fits into one chunk is only read once."""
    text = document.text.strip()
    if text and len(document.text) <= CHARS_OF_ONE * room:
        tokens = prompt.chunk(title, text)
        if len(tokens) <= limit:
            yield IngestStep("split", len(document.text), len(document.text))
            return [(text, tokens)]
    ends, sizes = yield from _atoms(document, prompt, room)
    return _pack(document.text, ends, sizes, room, limit, lambda text: prompt.chunk(title, text))


def _short_title(document: Document, prompt: PromptPiece, limit: int) -> str:
    """Return the title on one line, cut to its share of the chunk."""
    title = " ".join(document.title.split()) or " ".join(document.id.split())
    wrapper = len(prompt.chunk("", ""))
    share = max(1, int(TITLE_SHARE * (limit - wrapper)))
    kept = title
    while kept and len(prompt.chunk(kept, "")) - wrapper > share:
        title = title[: len(title) * 3 // 4].rstrip()
        kept = f"{title}…" if title else ""
    return kept


def _atoms(
    document: Document, prompt: PromptPiece, room: int
) -> Generator[IngestStep, None, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return (end of each atom as character offset, tokens up to there), both [atoms + 1] and starting with 0."""
    markdown = document.metadata.get("format") == "markdown" or PurePath(document.id).suffix.lower() == ".md"
    splitter_of = MarkdownSplitter if markdown else TextSplitter
    wrapper = len(prompt.chunk("", ""))

    def size(text: str) -> int:
        stripped = text.strip()
        return len(prompt.chunk("", stripped)) - wrapper + text.count("\n") if stripped else 0

    def cut(text: str, capacity: int) -> Iterator[tuple[int, int]]:
        """Yield (characters, tokens) of pieces of at most `capacity` characters, smaller where tokens are many."""
        for piece in splitter_of(capacity, trim=False).chunks(text):
            tokens = size(piece)
            if tokens > room and capacity > 1:
                yield from cut(piece, max(1, capacity // 4))
            else:
                yield len(piece), tokens

    lengths, tokens, done = [0], [0], 0
    for section in _sections(document.text):
        for length, count in cut(section, max(16, room // 2)):
            lengths.append(length)
            tokens.append(count)
        done += len(section)
        yield IngestStep("split", done, len(document.text))
    return np.cumsum(lengths, dtype=np.int64), np.cumsum(tokens, dtype=np.int64)


def _sections(text: str) -> Iterator[str]:
    """Yield pieces of at most SECTION characters, cut at the last paragraph, line or word in their second half."""
    start = 0
    while len(text) - start > SECTION:
        end = start + SECTION
        for pause in ("\n\n", "\n", " "):
            found = text.rfind(pause, start + SECTION // 2, end)
            if found >= 0:
                end = found + len(pause)
                break
        yield text[start:end]
        start = end
    yield text[start:]


def _pack(
    text: str,
    ends: NDArray[np.int64],
    sizes: NDArray[np.int64],
    room: int,
    limit: int,
    encode: Callable[[str], tuple[int, ...]],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (text, tokens) of each chunk. `ends` and `sizes` come from `_atoms`."""
    first, last = 0, len(ends) - 1
    while first < last:
        most = last
        while True:
            end = _cut(text, ends, sizes, first, most, room)
            piece = text[ends[first] : ends[end]].strip()
            tokens = encode(piece) if piece else ()
            if len(tokens) <= limit:
                break
            if end == first + 1:
                raise ConfigError(f"chunk_tokens {limit} is too small: {piece[:20]!r} alone takes {len(tokens)} tokens")
            most = end - 1
        if piece:
            yield piece, tokens
        first = end


def _cut(text: str, ends: NDArray[np.int64], sizes: NDArray[np.int64], first: int, most: int, room: int) -> int:
    """Return the atom at which the chunk that begins at atom `first` ends, `most` at the latest."""
    rest = int(sizes[-1] - sizes[first])
    if rest <= room and most == len(ends) - 1:
        return most
    target = rest / max(2, math.ceil(rest / (FILL * room)))
    low = int(np.searchsorted(sizes, sizes[first] + target / 2))
    high = int(np.searchsorted(sizes, sizes[first] + room, side="right")) - 1
    high = max(first + 1, min(high, most))
    low = max(first + 1, min(low, high))
    costs = [
        abs(int(sizes[end] - sizes[first]) - target) / target + _pause(text, int(ends[end]))
        for end in range(low, high + 1)
    ]
    return low + int(np.argmin(costs))


def _pause(text: str, at: int) -> float:
    """Return the cost of a cut of `text` at this offset."""
    left = right = at
    while left > max(0, at - _NEAR) and text[left - 1].isspace():
        left -= 1
    while right < min(len(text), at + _NEAR) and text[right].isspace():
        right += 1
    line = text.rfind("\n", max(0, left - _NEAR), left) + 1
    if text.startswith("#", line) and left < right:
        return _AFTER_HEADING
    lines = text.count("\n", left, right)
    if lines:
        return _PARAGRAPH if lines > 1 else _LINE
    ended = left
    while ended > 0 and text[ended - 1] in _CLOSERS:
        ended -= 1
    last = text[ended - 1 : ended]
    if left == right:
        return _SENTENCE if last and last in _WIDE_ENDS else _MIDST
    return _SENTENCE if last and last in _ENDS else _WORD
