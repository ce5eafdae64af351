"""Passages of documents, as an answer cites them and as a search returns them.

`dataclasses.asdict` gives the JSON objects of `POST /v1/answers`, `POST /v1/search`, `ragkv ask --json` and
`ragkv search --json`. Offsets count characters of the document's text, from 0, and belong to one version of it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.types import Chunk, Document, Hit, TextSpan

UNKNOWN = "unknown"
"""The answer where the documents do not say. Prompts ask for it, and the default model was trained to give it."""
PUNCTUATION = " \t\r\n.,;:!?…\"'“”‘’()[]"
"""What may stand around an answer's words."""
MAX_LABEL = 512
"""Characters of a title or a heading. They are stored with every chunk and shown with every passage."""
MARKED_FORMATS = ("markdown", "html", "docx", "pptx", "xlsx", "epub", "eml")
"""Formats whose text marks headings with `#`. No set: users write metadata, and what they write may have no hash."""

_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_MARKED = re.compile(r"^ {0,3}(?:#|```|~~~)", re.MULTILINE)
"""Where a line begins that may be a heading or a fence."""


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Return the offset in UTF-8 of every character, and of the end: [len(text) + 1]."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def is_unknown(answer: str) -> bool:
    """Whether an answer says that the documents do not say."""
    return answer.strip(PUNCTUATION).casefold() == UNKNOWN


def shortened(text: str, most: int = MAX_LABEL) -> str:
    """Return a text, cut to `most` characters. One that is cut ends in an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def heading_of(line: str) -> str:
    """Return the text of a line that is a heading with `#`, without its marks; "" for any other line."""
    mark = _HEADING.match(line)
    return line[mark.end() :].rstrip(" \t").rstrip("#").rstrip(" \t") if mark else ""


def fence_of(line: str) -> str:
    """Return the mark with which a line begins or ends code; "" for any other line."""
    fence = _FENCE.match(line)
    return fence[1] if fence else ""


def headings(text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, text) of each heading outside of code, in a text that marks headings as Markdown does.

    A heading of more than MAX_LABEL characters is cut.
    """
    fenced = ""
    for marked in _MARKED.finditer(text):
        start, end = marked.start(), text.find("\n", marked.end())
        line = text[start:end] if end >= 0 else text[start:]
        if fence := fence_of(line):
            fenced = "" if fenced == fence else fenced or fence
        elif not fenced and (heading := heading_of(line)):
            yield start, shortened(heading)


def page_name(document_id: str, page: int | None) -> str:
    """Return what people call a page of a document: `page 3`, or `slide 3` of a presentation; "" of None."""
    kind = "slide" if PurePath(document_id).suffix.lower() == ".pptx" else "page"
    return "" if page is None else f"{kind} {page}"


def has_headings(document_id: str, metadata: Mapping[str, Any]) -> bool:
    """Whether `#` at the start of a line marks a heading in a document."""
    return metadata.get("format") in MARKED_FORMATS or PurePath(document_id).suffix.lower() == ".md"


def locate(document: Document, texts: Iterable[str]) -> Iterator[TextSpan | None]:
    """Find the chunks of a document in its text, each when it is asked for.

    A chunk's text is a piece of its document's text, and chunks are in order, so each is found behind the previous one.

    Args:
        document: The document.
        texts: Texts of its chunks, in order.

    Yields:
        One span for each text; None for a text that does not occur behind the previous one.
    """
    marked = has_headings(document.id, document.metadata)
    following = headings(document.text) if marked else iter(())
    coming, above = next(following, None), ""
    page_starts = [start for start, _ in document.pages]
    position = 0
    for text in texts:
        start = document.text.find(text, position)
        if start < 0:
            yield None
            continue
        position = start + len(text)
        while coming and coming[0] <= start:
            above, coming = coming[1], next(following, None)
        page = bisect.bisect_right(page_starts, start)
        inside = document.pages[page : bisect.bisect_left(page_starts, position)]
        yield TextSpan(start, position, above, document.pages[page - 1][1] if page else None, inside)


@dataclass(frozen=True)
class Mark:
    """A place in a document where the words of an answer occur.

    Attributes:
        start: Offset of its first character.
        end: Offset after its last character.
        sentence_start: Offset of the sentence that it is in.
        sentence_end: Offset after that sentence.
    """

    start: int
    end: int
    sentence_start: int
    sentence_end: int


@dataclass(frozen=True)
class Citation:
    """A retrieved chunk that was in the context of the answer.

    Attributes:
        document_id: Id of its document.
        chunk_id: Id of the chunk.
        title: Title of the chunk.
        score: Fused rank score of the retrieval.
        version: Number of the version of the document.
        chunk: Position of the chunk in the document, from 0.
        heading: The heading above its best mark, without marks that above its beginning; None if there is none or the
            format has no headings.
        page: Number, from 1, of the page of its best mark, else of the one on which it begins; None without pages.
        start: Offset of its first character; None if its place is not known.
        end: Offset after its last character.
        text: Text of the chunk.
        marks: Where in it the answer's words occur. Empty before there is an answer.
    """

    document_id: str
    chunk_id: str
    title: str
    score: float
    version: int = 1
    chunk: int = 0
    heading: str | None = None
    page: int | None = None
    start: int | None = None
    end: int | None = None
    text: str = ""
    marks: tuple[Mark, ...] = ()

    @classmethod
    def of(cls, hit: Hit, marks: tuple[Mark, ...] = (), question: str = "") -> Citation:
        """Cite a retrieved chunk. question: says which mark is the best one."""
        chunk = hit.chunk
        place = (chunk.version, chunk.ordinal, *_place(chunk))
        citation = cls(chunk.document_id, chunk.id, chunk.title, hit.score, *place, marks)
        if chunk.span is None or not marks:
            return citation
        best = citation.best_mark(question).start
        pages = (number for start, number in reversed(chunk.span.pages) if start <= best)
        above = [text for start, text in headings(chunk.text) if start <= best - chunk.span.start]
        heading = above[-1] if above and citation.heading else citation.heading
        return replace(citation, heading=heading, page=next(pages, citation.page))

    def best_mark(self, question: str) -> Mark:
        """Return the mark, of at least one, whose sentence has most words of a question; the first of equals."""
        asked, at = _words(question), self.start or 0
        said = (_words(self.text[mark.sentence_start - at : mark.sentence_end - at]) for mark in self.marks)
        return max(zip(said, self.marks, strict=True), key=lambda pair: len(asked & pair[0]))[1]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold()))


@dataclass(frozen=True)
class FoundPassage:
    """A chunk that a search found.

    Attributes:
        document_id: Id of its document.
        chunk_id: Id of the chunk.
        title: Title of the chunk.
        score: Fused rank score, by which passages are sorted.
        similarity: Cosine similarity of query and chunk, by the embedder.
        word_score: BM25 score; None if the chunk was not among the best by its words.
        version: Number of the version of the document.
        chunk: Position of the chunk in the document, from 0.
        heading: The heading that its beginning stands under; None as in a citation, and so are the following.
        page: Number of the page.
        start: Offset of its first character.
        end: Offset after its last character.
        text: Text of the chunk.
    """

    document_id: str
    chunk_id: str
    title: str
    score: float
    similarity: float
    word_score: float | None
    version: int
    chunk: int
    heading: str | None
    page: int | None
    start: int | None
    end: int | None
    text: str

    @classmethod
    def of(cls, hit: Hit) -> FoundPassage:
        """Convert a retrieved chunk."""
        chunk, similarity, words = hit.chunk, hit.similarity, hit.word_score
        place = (chunk.version, chunk.ordinal, *_place(chunk))
        return cls(chunk.document_id, chunk.id, chunk.title, hit.score, similarity, words, *place)


@dataclass(frozen=True)
class SearchTimings:
    """Durations of the steps of a search, in milliseconds.

    Attributes:
        words: Full-text search.
        embed: Embedding the query.
        vectors: Vector search, with what it takes to bring the index up to date.
        rerank: Ordering the candidates anew; 0 without a reranker.
        total: The whole search.
    """

    words: float
    embed: float
    vectors: float
    rerank: float
    total: float


@dataclass(frozen=True)
class SearchReport:
    """What a search did.

    Attributes:
        embedder: Name of the embedder.
        reranker: Name of the reranker; None without one.
        chunks: Chunks of the collection whose vectors were searched, before any filter.
        exact: Whether the vector search compared all of them, or followed a graph.
        by_words: Candidates that the full-text search gave.
        by_vector: Candidates that the vector search gave.
        timings_ms: Durations of the steps.
    """

    embedder: str
    reranker: str | None
    chunks: int
    exact: bool
    by_words: int
    by_vector: int
    timings_ms: SearchTimings


@dataclass(frozen=True)
class SearchResult:
    """The passages for a query.

    Attributes:
        query: Text of the query.
        passages: The passages, best first.
        report: What the search did.
    """

    query: str
    passages: tuple[FoundPassage, ...]
    report: SearchReport


def _place(chunk: Chunk) -> tuple[str | None, int | None, int | None, int | None, str]:
    """Return (heading, page, start, end, text) of a chunk."""
    span = chunk.span
    if span is None:
        return None, None, None, None, chunk.text
    return span.heading or None, span.page, span.start, span.end, chunk.text
