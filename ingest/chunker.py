"""Cut documents into chunks of even size that end at a pause of the text and fit the model's chunk size.

    atoms    the splitter cuts the text into small pieces: at paragraphs, then sentences, then words
    pack     atoms are joined to as few chunks as fit, of about the same size; each cut is at the strongest pause near
             the even position, and never right after a heading
    exact    the size of a chunk is that of its real prompt piece; the sums over atoms only guide the
             search

A document that fits into one chunk is left whole. Counting the tokens of atoms and adding them up is about five times
faster than letting the splitter call the tokenizer.

The time is linear in the text, whatever the text is. A chunk has at most CHARS_OF_TOKEN characters for each token, what
the sums of its atoms promise is about what it has, and a long run of text without a pause is given to the splitter in
parts. Between two steps lies a bounded piece of the work.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Generator, Iterator
from itertools import chain
from pathlib import PurePath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from ragkv.errors import ConfigError, InvalidDocument
from ragkv.ingest.progress import IngestStep, run_to_end
from ragkv.passages import locate
from ragkv.types import Chunk, Document

SECTION = 32768
"""Characters given to the splitter at once, where the text has pauses."""
RUN_CHARS, RUN_PIECES = 1024, 32
"""Most characters of a run without a pause that are given to the splitter at once: so many, or so many pieces. Its time
is quadratic in the length of a run."""
TITLE_SHARE = 0.25
"""Share of a chunk's tokens that its title may take. A longer title is shortened."""
FILL = 0.9
"""Share of the limit that a planned chunk fills. The rest leaves a choice of pauses."""
LEAST_ROOM = 16
"""Fewest tokens of text that a chunk must have room for."""

CHARS_OF_ONE = 6
"""Characters for each token of room up to which a document is tried as one chunk. English has about four a token."""
CHARS_OF_TOKEN = 64
"""Most characters of a chunk for each token of room: a tokenizer may make few tokens, or none, of a long run."""
SHORT = 16
"""Characters of an atom that need no tokens, such as the line ends between two paragraphs."""
TITLE_CHARS = 4096
"""Characters of a title that are tokenised to find out how many of them fit."""
STEP_ATOMS = 256
"""Atoms that are measured in one step."""
MISSES, MISS = 8, 3.0
"""How often a chunk that turns out too long is shortened by one atom, and how many times as long as allowed it may be
then. Any other is shortened by a share."""

# The cost of a cut at each place, as the share of a chunk's size by which the cut may be moved to avoid it.
_PARAGRAPH, _LINE, _SENTENCE, _WORD, _MIDST, _AFTER_HEADING = 0.0, 0.15, 0.25, 0.6, 1.0, 2.0
_ENDS = ".!?…:;。！？"
_CLOSERS = "\"'”’»)]*_"
_WIDE_ENDS = "。！？"
_NEAR = 256
"""Characters around a cut that are examined."""
_PAUSE = re.compile(
    r"\n|[!?。！？](?=[^\W_])|\.[\"'”’)\]]{0,4}\s(?=[A-ZÀ-ÖØ-ÞΑ-ΩА-ЯЁ])|[!?][\"'”’)\]]{0,4}\s(?=[^\W_])"
)
"""Where the splitter is certain to see a pause, by the sentence boundaries of Unicode (UAX 29)."""


class PromptPiece(Protocol):
    """The part of ragkv.model.prompt.Prompt that chunking needs."""

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        """Return the token ids of title and text in their prompt piece."""
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
        A `split` step, in characters, after each piece of the work. Half of it is cutting into atoms.

    Raises:
        InvalidDocument: The document has no text.
        ConfigError: `limit` leaves no room for text.
    """
    title = _short_title(document, prompt, limit)
    room = limit - len(prompt.chunk(title, ""))
    if room < LEAST_ROOM:
        raise ConfigError(f"chunk_tokens {limit} leaves {room} tokens for text, {LEAST_ROOM} are needed; raise it")
    pieces = yield from _pieces(document, prompt, title, room, limit)
    if not pieces:
        raise InvalidDocument(f"document {document.id!r} is empty")
    chunks, whole = list[Chunk](), len(document.text)
    for ordinal, span in enumerate(locate(document, (text for text, _ in pieces))):
        text, tokens = pieces[ordinal]
        chunks.append(Chunk(f"{document.id}#{ordinal}", document.id, ordinal, title, text, tokens, span))
        yield IngestStep("split", whole, whole)
    return chunks


def _pieces(
    document: Document, prompt: PromptPiece, title: str, room: int, limit: int
) -> Generator[IngestStep, None, list[tuple[str, tuple[int, ...]]]]:
    """Return (text, tokens) of each chunk. A document that fits into one chunk is only read once."""
    text, whole = document.text.strip(), len(document.text)
    if text and whole <= CHARS_OF_ONE * room:
        tokens = prompt.chunk(title, text)
        if len(tokens) <= limit:
            yield IngestStep("split", whole, whole)
            return [(text, tokens)]
    atoms = yield from _atoms(document, prompt, room)
    # One object per distinct id instead of one per token: 8 bytes a token instead of 36.
    ids: dict[int, int] = {}
    pieces = []
    for end, text, tokens in _pack(atoms, room, limit, lambda text: prompt.chunk(title, text)):
        if text:
            pieces.append((text, tuple(map(ids.setdefault, tokens, tokens))))
        yield IngestStep("split", (whole + end) // 2, whole)
    return pieces


def _short_title(document: Document, prompt: PromptPiece, limit: int) -> str:
    """Return the title on one line, cut to its share of the chunk."""
    title = " ".join(document.title.lstrip()[:TITLE_CHARS].split()) or " ".join(document.id.split())
    around = len(prompt.chunk("", ""))
    share = max(1, int(TITLE_SHARE * (limit - around)))
    kept = title
    while kept and len(prompt.chunk(kept, "")) - around > share:
        title = title[: len(title) * 3 // 4].rstrip()
        kept = f"{title}…" if title else ""
    return kept


def _atoms(document: Document, prompt: PromptPiece, room: int) -> Generator[IngestStep, None, _Atoms]:
    markdown = document.metadata.get("format") == "markdown" or PurePath(document.id).suffix.lower() == ".md"
    splitter_of = MarkdownSplitter if markdown else TextSplitter
    around = len(prompt.chunk("", ""))

    def size(text: str) -> int:
        stripped = text.strip()
        return len(prompt.chunk("", stripped)) - around + text.count("\n") if stripped else 0

    def cut(text: str, capacity: int) -> Iterator[tuple[str, int]]:
        """Yield (text, tokens) of pieces of at most `capacity` characters, smaller where tokens are many."""
        for piece in splitter_of(capacity, trim=False).chunks(text):
            tokens = size(piece)
            if tokens > room and capacity > 1:
                yield from cut(piece, max(1, capacity // 4))
            else:
                yield piece, tokens

    ends, weights, spaced = array("q", [0]), array("q", [0]), array("q", [0])
    capacity, whole = max(16, room // 2), len(document.text)
    for section in _sections(document.text, max(RUN_CHARS, RUN_PIECES * capacity)):
        for piece, tokens in cut(section, capacity):
            ends.append(ends[-1] + len(piece))
            weights.append(weights[-1] + max(CHARS_OF_TOKEN * tokens, len(piece) // SHORT * SHORT))
            spaced.append(spaced[-1] + CHARS_OF_TOKEN * max(1, tokens + len(piece) - len(piece.strip())))
            if len(ends) % STEP_ATOMS == 0:
                yield IngestStep("split", ends[-1] // 2, whole)
        yield IngestStep("split", ends[-1] // 2, whole)
    return _Atoms(document.text, *(np.frombuffer(numbers, np.int64) for numbers in (ends, weights, spaced)))


def _sections(text: str, run: int) -> Iterator[str]:
    """Yield pieces of at most SECTION characters, cut at the last paragraph, line or word in their second half.

    Those with more than `run` characters between two pauses are cut there, too.
    """
    start = 0
    while len(text) - start > SECTION:
        end = start + SECTION
        for pause in ("\n\n", "\n", " "):
            found = text.rfind(pause, start + SECTION // 2, end)
            if found >= 0:
                end = found + len(pause)
                break
        yield from _runs(text[start:end], run)
        start = end
    yield from _runs(text[start:], run)


def _runs(section: str, run: int) -> Iterator[str]:
    """Cut a section where over `run` characters lie between two pauses."""
    start = paused = 0
    for pause in chain((match.end() for match in _PAUSE.finditer(section)), (len(section),)):
        while pause - paused > run:
            paused += run
            paused = section.rfind(" ", paused - run // 2, paused) + 1 or paused
            yield section[start:paused]
            start = paused
        paused = pause
    yield section[start:]


def _pack(
    atoms: _Atoms, room: int, limit: int, encode: Callable[[str], tuple[int, ...]]
) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Yield (offset of its end, text, tokens) of each chunk. The text is "" where there is only white space."""
    first, last = 0, len(atoms.ends) - 1
    while first < last:
        most, misses = last, 0
        while True:
            end = atoms.cut(first, most, CHARS_OF_TOKEN * room)
            piece = atoms.text[atoms.ends[first] : atoms.ends[end]].strip()
            tokens = encode(piece) if piece else ()
            if len(tokens) <= limit:
                break
            if end == first + 1:
                raise ConfigError(f"chunk_tokens {limit} is too small: {piece[:20]!r} alone takes {len(tokens)} tokens")
            misses += 1
            if misses > MISSES or len(tokens) > MISS * limit:
                atoms.weights = atoms.spaced
            near = misses <= MISSES and len(tokens) <= MISS * limit
            most = end - 1 if near else first + max(1, int((end - first) * min(0.8, limit / len(tokens))))
        yield int(atoms.ends[end]), piece, tokens
        first = end


class _Atoms:
    """The atoms of a text.

    Attributes:
        text: The text.
        ends: Offset of the end of each atom, [atoms + 1], starting with 0.
        weights: What the atoms up to there weigh, [atoms + 1], starting with 0: CHARS_OF_TOKEN for each token, and at
            least 1 for each character of an atom that is not short. White space around an atom has no tokens, as at
            the ends of a chunk.
        spaced: The same with a token for each character around an atom. It takes the place of `weights` where a chunk
            has turned out far too long.
    """

    def __init__(
        self, text: str, ends: NDArray[np.int64], weights: NDArray[np.int64], spaced: NDArray[np.int64]
    ) -> None:
        self.text, self.ends, self.weights, self.spaced = text, ends, weights, spaced
        self._pauses = np.full(len(ends), np.nan)

    def cut(self, first: int, most: int, room: int) -> int:
        """Return the atom at which the chunk that begins at atom `first` ends, at most `most`. room: as a weight."""
        weights, begun = self.weights, int(self.weights[first])
        rest = int(weights[-1]) - begun
        if rest <= room and most == len(self.ends) - 1:
            return most
        target = rest / max(2, math.ceil(rest / (FILL * room)))
        low = int(np.searchsorted(weights, math.ceil(begun + target / 2)))
        high = int(np.searchsorted(weights, begun + room, side="right")) - 1
        high = max(first + 1, min(high, most))
        low = max(first + 1, min(low, high))
        costs = np.abs(weights[low : high + 1] - begun - target) / target + self._costs(low, high + 1)
        return low + int(np.argmin(costs))

    def _costs(self, low: int, end: int) -> NDArray[np.float64]:
        """Return the cost of a cut at each of these atoms. Each is found once."""
        costs = self._pauses[low:end]
        for place in np.flatnonzero(np.isnan(costs)):
            costs[place] = _pause(self.text, int(self.ends[low + place]))
        return costs


def _pause(text: str, at: int) -> float:
    """Return the cost of a cut of `text` at this offset."""
    before, behind = text[max(0, at - _NEAR) : at], text[at : at + _NEAR]
    left, right = at - len(before) + len(before.rstrip()), at + len(behind) - len(behind.lstrip())
    line = text.rfind("\n", max(0, left - _NEAR), left) + 1
    if text.startswith("#", line) and left < right:
        return _AFTER_HEADING
    lines = text.count("\n", left, right)
    if lines:
        return _PARAGRAPH if lines > 1 else _LINE
    last = text[max(0, left - _NEAR) : left].rstrip(_CLOSERS)[-1:]
    if left == right:
        return _SENTENCE if last and last in _WIDE_ENDS else _MIDST
    return _SENTENCE if last and last in _ENDS else _WORD
