"""Citations: which chunks an answer cites, and where in them its words stand.

An answer cites the chunks that were retrieved for it, in prompt order. Those that its words occur in are marked:

    span        the whole answer occurs, in any case and with any white space: each occurrence, with its sentence
    sentence    else, the sentences that contain every word of the answer

A sign that stands alone in its line, such as a bracket of a listing, is in no sentence and is not marked.
A small number stands in many sentences: where some of its sentences hold a word of the question, only those are marked.
`yes` and `no` are judgements and no quotations: the sentence that decides is marked, if there is one. An answer
`unknown` cites nothing: the chunks that were retrieved do not support it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from ragkv.engine.occurrences import occurrences, words_of
from ragkv.engine.support import deciding_sentence, is_judgement, sentences, stems
from ragkv.passages import PUNCTUATION, Citation, Mark, is_unknown
from ragkv.types import Chunk, Hit

MAX_MARKS = 8
"""Most marks of one chunk."""
MAX_WORDS = 32
"""An answer with more words is searched as a whole only: no sentence has all its words by another order."""
SMALL = 3
"""Digits of a number that may stand anywhere."""

_WORD = re.compile(r"\w")


def cite(hits: Sequence[Hit], answer: str, question: str = "") -> tuple[Citation, ...]:
    """Return the citations of an answer.

    Args:
        hits: The chunks that were retrieved, in prompt order.
        answer: Text of the answer.
        question: The question.
    """
    if is_unknown(answer):
        return ()
    if is_judgement(answer):
        marks = _judged(hits, question)
    else:
        marks = [mark(hit.chunk, answer) for hit in hits]
        digits = answer.strip(PUNCTUATION)
        if digits.isdigit() and len(digits) <= SMALL:
            marks = _near(hits, marks, question)
    return tuple(Citation.of(hit, each, question) for hit, each in zip(hits, marks, strict=True))


def mark(chunk: Chunk, answer: str) -> tuple[Mark, ...]:
    """Return where the words of an answer stand in a chunk; () if its place in the document is not known."""
    words = answer.strip(PUNCTUATION).split()
    if chunk.span is None or not words or is_judgement(answer):
        return ()
    found, wanted = occurrences(chunk.text, words), words_of(" ".join(words))
    if not found and not 1 < len(wanted) <= MAX_WORDS:
        return ()
    spans = sentences(chunk.text)
    found = found or [span for span in spans if wanted <= words_of(chunk.text[slice(*span)])]
    offset = chunk.span.start
    around = ((*span, *_around(spans, *span)) for span in found)
    told = (each for each in around if _WORD.search(chunk.text, *each[2:]))
    return tuple(Mark(*(offset + place for place in each)) for each in islice(told, MAX_MARKS))


def _judged(hits: Sequence[Hit], question: str) -> list[tuple[Mark, ...]]:
    """Return the marks of an answer `yes` or `no`: the sentence that decides."""
    decided = deciding_sentence(question, [hit.chunk.text for hit in hits])
    marks: list[tuple[Mark, ...]] = [()] * len(hits)
    span = None if decided is None else hits[decided[0]].chunk.span
    if decided is not None and span is not None:
        number, start, end = decided[0], span.start + decided[1], span.start + decided[2]
        marks[number] = (Mark(start, end, start, end),)
    return marks


def _near(hits: Sequence[Hit], marks: Sequence[tuple[Mark, ...]], question: str) -> list[tuple[Mark, ...]]:
    """Return the marks whose sentence holds a word of the question; all of them where none does."""
    sought = stems(question)
    near = [
        tuple(each for each in mine if sought & stems(_sentence(hit.chunk, each)))
        for hit, mine in zip(hits, marks, strict=True)
    ]
    return near if any(near) else list(marks)


def _sentence(chunk: Chunk, found: Mark) -> str:
    assert chunk.span is not None, "a chunk without a place has no marks"
    return chunk.text[found.sentence_start - chunk.span.start : found.sentence_end - chunk.span.start]


def _around(spans: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the place of the sentences that hold text[start:end]."""
    holding = [each for each in spans if each[0] < end and start < each[1]]
    return (min(start, holding[0][0]), max(end, holding[-1][1])) if holding else (start, end)
