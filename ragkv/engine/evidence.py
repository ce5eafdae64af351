"""Finds the evidence of a question in retrieved chunks: the glue between texts and `recompute/evidence.py`.

The windows of blocks are ranges of bytes of a chunk's text. Segments that the catalogue keeps are pooled over them, and
the words of the question and of the chunks' titles are looked for in them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ragkv.engine.word_places import WordPlaces, in_windows, word_beginnings, word_places
from ragkv.model.prompt import Prompt
from ragkv.normalisation import UNSPACED, fold_with_offsets, numbers, searchable
from ragkv.passages import byte_offsets
from ragkv.recompute.evidence import WITHOUT_PASS, BlockEvidence, Kind
from ragkv.types import SEGMENT_BYTES, Chunk, Hit

MOST_WORDS = 64
"""Words of a question that are looked for; a longer question has its first ones."""
KNOWN_BYTES = 2**26
"""Memory for what is known of chunks: about 200 KB of a chunk of 1,024 tokens. Without it every question about a
popular chunk would fold its text and add up its segments again."""
INDEX_BYTES = 15
"""Memory for the index of a text's words, about, for each of its characters."""
MOST_TITLE_WORDS = 16
"""Words of a title that are looked for in other chunks; a longer title has its first ones."""


class SegmentFinder(Protocol):
    """The part of `ragkv.retrieval.Retriever` that evidence needs."""

    @property
    def identity(self) -> Hashable:
        """Of the embedder that makes segments and vectors of questions."""
        ...

    def question_vector(self, question: str) -> NDArray[np.float32]: ...

    def segments(self, hits: Sequence[Hit]) -> list[NDArray[np.int8]]: ...


@dataclass(frozen=True, eq=False)
class SearchedText:
    """What words are looked for in: in one form of each character, in lower case, grouped numbers in one piece behind.

    Attributes:
        text: The text of a chunk.
        offsets: The byte of the chunk's text that each character of `text` stands for; None where they are the same.
        bytes: Bytes of the chunk's text.
        title: The title of the chunk.
        title_words: The words of the title.
    """

    text: str
    offsets: NDArray[np.int64] | None
    bytes: int
    title: str
    title_words: tuple[str, ...]

    @cached_property
    def index(self) -> WordPlaces:
        """Where the words of the text stand."""
        return word_places(self.text, self.offsets)


class JoinedTexts:
    """The texts of several chunks, as if they stood behind each other, and their windows.

    Attributes:
        searched: The chunks.
        starts: The byte at which the text of each chunk begins.
        sizes: Windows of each chunk, B.
        first: First byte of each window [sum of B].
        last: Last byte, likewise.
    """

    def __init__(self, searched: Sequence[SearchedText], windows: Sequence[NDArray[np.float64]]):
        """Join texts. windows: first and last byte of each window of each chunk [2, B]."""
        self.searched, self.sizes = searched, [own.shape[1] for own in windows]
        self.starts = _beginnings(text.bytes for text in searched)
        joined = [own + start for own, start in zip(windows, self.starts, strict=True)]
        self.first, self.last = np.concatenate(joined, axis=1)

    def offsets(self) -> NDArray[np.int64]:
        """Return the byte that each character of the texts, with one between two of them, stands for."""
        offsets = list[NDArray[np.int64]]()
        for text, start in zip(self.searched, self.starts, strict=True):
            own = np.arange(len(text.text)) if text.offsets is None else text.offsets[: len(text.text)]
            offsets += [own + start, np.array([start + text.bytes])]
        return np.concatenate(offsets)


@dataclass(frozen=True, eq=False)
class KnownChunk:
    """What is the same of a chunk for every question.

    Attributes:
        bounds: First and last byte of the window of each block [2, B], in the text of the chunk.
        vectors: Unit vector of each window [B, dimension] float32, on the CPU.
        searched: What words are looked for in.
    """

    bounds: NDArray[np.float64]
    vectors: Tensor
    searched: SearchedText

    @property
    def bytes(self) -> int:
        """Memory, about: the text counts twice, because chunks are known by theirs, and its index as if made."""
        offsets = 0 if self.searched.offsets is None else self.searched.offsets.nbytes
        return self.bounds.nbytes + self.vectors.nbytes + (2 + INDEX_BYTES) * len(self.searched.text) + offsets


class EvidenceFinder:
    """Finds evidence in chunks that one model reads. Holds no request state; one thread at a time uses it."""

    def __init__(self, finder: SegmentFinder, prompt: Prompt, block: int):
        """Set up the finder.

        Args:
            finder: Knows the segments of chunks, and embeds questions.
            prompt: Places tokens in texts.
            block: Tokens of a block.
        """
        self._finder, self._prompt, self._block = finder, prompt, block
        self._known: OrderedDict[Hashable, KnownChunk] = OrderedDict()
        self._bytes = 0

    def find(self, question: str, hits: Sequence[Hit], kinds: Sequence[Kind] = WITHOUT_PASS) -> list[BlockEvidence]:
        """Return the evidence in the chunk of each hit.

        Args:
            question: The question.
            hits: The chunks.
            kinds: The kinds that count. Titles are looked for where `links` is one of them.

        Raises:
            ModelNotFound: The embedder cannot be loaded.
        """
        chunks = self._know(hits)
        if not chunks:
            return []
        vector, words = torch.from_numpy(self._finder.question_vector(question)), question_words(question)
        titling = chunks if "links" in kinds else []
        titles = dict.fromkeys(word for chunk in titling for word in chunk.searched.title_words if word not in words)
        names = {word: number for number, word in enumerate(titles)}
        # All chunks at once: what is done for each of them alone takes longer than the search itself.
        texts = JoinedTexts([chunk.searched for chunk in chunks], [chunk.bounds for chunk in chunks])
        # Products alone: together they would be rounded otherwise, and a block at the edge of a budget kept or not.
        meaning = (chunk.vectors @ vector for chunk in chunks)
        parts = (found.split(texts.sizes) for found in (find_words(words, texts), find_named(names, texts)))
        titled = (_flags(names, text.title_words) for text in texts.searched)
        return [BlockEvidence(*mine) for mine in zip(meaning, *parts, titled, strict=True)]

    def _know(self, hits: Sequence[Hit]) -> list[KnownChunk]:
        """Return what is known of the chunk of each hit; what is used least makes room for what is new."""
        identity = self._finder.identity
        # Wrapper tokens move the blocks of a text; the first token tells of them.
        names = [(identity, hit.chunk.title, hit.chunk.text, hit.chunk.tokens[:1]) for hit in hits]
        missing = {name: hit for name, hit in zip(names, hits, strict=True) if name not in self._known}
        segments = self._finder.segments([*missing.values()]) if missing else []
        for (name, hit), mine in zip(missing.items(), segments, strict=True):
            bounds = self._windows(hit.chunk)
            self._known[name] = KnownChunk(bounds, window_vectors(mine, bounds), searched_text(hit.chunk))
            self._bytes += self._known[name].bytes
        for name in names:
            self._known.move_to_end(name)
        chunks = [self._known[name] for name in names]
        while self._bytes > KNOWN_BYTES:
            self._bytes -= self._known.popitem(last=False)[1].bytes
        return chunks

    def _windows(self, chunk: Chunk) -> NDArray[np.float64]:
        """Return first and last byte of the window of each block [2, B], in the text of the chunk."""
        ends = self._prompt.token_ends(chunk.title, chunk.text, chunk.tokens)
        last = np.append(ends[self._block - 1 : -1 : self._block], ends[-1])
        first = np.concatenate([[0.0], last[:-1]])
        windows = np.stack([np.append(first[:1], first[:-1]), np.append(last[1:], last[-1:])])
        bounds: NDArray[np.float64] = np.clip(windows, 0.0, len(chunk.text.encode()))
        return bounds


def as_hits(chunks: Sequence[tuple[str, str]], tokens: Sequence[tuple[int, ...]]) -> list[Hit]:
    """Return chunks, each a title and a text, with their token ids, as retrieval would return them."""
    pairs = enumerate(zip(chunks, tokens, strict=True))
    return [Hit(Chunk(f"#{i}", "", i, title, text, ids), 0.0, i) for i, ((title, text), ids) in pairs]


def window_vectors(segments: NDArray[np.int8], bounds: NDArray[np.float64]) -> Tensor:
    """Return the direction of each window of a text.

    Args:
        segments: Segments of the text [S, dimension].
        bounds: First and last byte of each window [2, W].

    Returns:
        Unit vectors [W, dimension] float32, on the CPU; zeros for a window of no length. A window is the sum of its
        segments, each with the share of it that is in the window.
    """
    rows, numbers = F.normalize(torch.from_numpy(segments.astype(np.float32)), dim=1), np.arange(len(segments))
    first, last = np.clip(bounds / SEGMENT_BYTES, 0, len(segments))
    inside = (np.minimum(numbers + 1, last[:, None]) - np.maximum(numbers, first[:, None])).clip(min=0)
    return F.normalize(torch.from_numpy(inside.astype(np.float32)) @ rows, dim=1)


def question_words(question: str) -> tuple[str, ...]:
    """Return what is looked for: the beginnings of words, and pairs of characters of scripts without spaces."""
    words = (word for word, _ in word_beginnings(searchable(question).lower()))
    return tuple(dict.fromkeys(words))[:MOST_WORDS]


def find_words(words: Sequence[str], texts: JoinedTexts) -> Tensor:
    """Return which words stand in each window, or in the title of its chunk [sum of B, W] bool.

    words: as `question_words` returns them.
    """
    text, offsets = "\n".join(chunk.text for chunk in texts.searched), texts.offsets()
    title = "\n".join(chunk.title for chunk in texts.searched)
    titles = _beginnings(len(chunk.title) for chunk in texts.searched)
    chunk = np.repeat(np.arange(len(texts.sizes)), texts.sizes)
    present = np.zeros((len(chunk), len(words)), bool)
    for number, word in enumerate(words):
        at = np.sort(offsets[_places(text, word)])
        inside = np.searchsorted(at, texts.last, "left") > np.searchsorted(at, texts.first, "left")
        entitled = np.searchsorted(titles, _places(title, word), "right") - 1
        present[:, number] = inside | np.isin(chunk, entitled)
    return torch.from_numpy(present)


def find_named(names: Mapping[str, int], texts: JoinedTexts) -> Tensor:
    """Return which words of titles stand in the text of each window [sum of B, U] bool.

    names: beginnings of words, or pairs of characters, with their columns.
    """
    if not names:
        return torch.zeros(len(texts.first), 0, dtype=torch.bool)
    found = [text.index.places_of(names) for text in texts.searched]
    at = np.concatenate([places + start for (places, _), start in zip(found, texts.starts, strict=True)])
    return in_windows(at, np.concatenate([columns for _, columns in found]), (texts.first, texts.last), len(names))


def _beginnings(sizes: Iterable[int]) -> list[int]:
    """Return where pieces of these sizes begin that stand behind each other, with one place between two of them."""
    return [*accumulate((size + 1 for size in sizes), initial=0)][:-1]


def _flags(names: Mapping[str, int], words: Sequence[str]) -> Tensor:
    """Return which names are among some words [U] bool."""
    flags = np.zeros(len(names), bool)
    flags[[names[word] for word in words if word in names]] = True
    return torch.from_numpy(flags)


def searched_text(chunk: Chunk) -> SearchedText:
    """Return what words are looked for in of a chunk."""
    (text, offsets), title = _searched(chunk.text), _searched(chunk.title)[0]
    words = dict.fromkeys(word for word, _ in word_beginnings(title))
    return SearchedText(text, offsets, len(chunk.text.encode()), title, tuple(words)[:MOST_TITLE_WORDS])


def _searched(text: str) -> tuple[str, NDArray[np.int64] | None]:
    """Return what words are looked for in, and the byte of the text that each of its characters stands for."""
    read, stands = fold_with_offsets(text)
    grouped = list(numbers(read))
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
