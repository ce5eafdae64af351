"""Citations: which chunks an answer cites, and where in them its words stand.

An answer cites the chunks that were retrieved for it, in prompt order. Those that its words occur in are marked:

    span        the whole answer occurs, in any case and with any white space: each occurrence, with its sentence
    sentence    else, the sentences that contain every word of the answer

`yes` and `no` are judgements and no quotations, so they are never marked. An answer `unknown` cites nothing: the chunks
that were retrieved do not support it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ragkv.normalisation import folded
from ragkv.passages import PUNCTUATION, Citation, Mark, is_unknown, occurrences
from ragkv.types import Chunk, Hit

MAX_MARKS = 8
"""Most marks of one chunk."""
MAX_WORDS = 32
"""An answer with more words is searched as a whole only: no sentence has all its words by another order."""

_JUDGEMENTS = frozenset({"yes", "no"})
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")


def cite(hits: Sequence[Hit], answer: str) -> tuple[Citation, ...]:
    """Return the citations of an answer.

    Args:
        hits: The chunks that were retrieved, in prompt order.
        answer: Text of the answer.
    """
    if is_unknown(answer):
        return ()
    return tuple(Citation.of(hit, mark(hit.chunk, answer)) for hit in hits)


def mark(chunk: Chunk, answer: str) -> tuple[Mark, ...]:
    """Return where the words of an answer stand in a chunk; () if its place in the document is not known."""
    words = answer.strip(PUNCTUATION).split()
    if chunk.span is None or not words or " ".join(words).casefold() in _JUDGEMENTS:
        return ()
    found, wanted = occurrences(chunk.text, words), _words(" ".join(words))
    if not found and not 1 < len(wanted) <= MAX_WORDS:
        return ()
    sentences = _sentences(chunk.text)
    found = found or _sentences_with(chunk.text, sentences, wanted)
    offset = chunk.span.start
    return tuple(
        Mark(*(offset + place for place in (start, end, *_around(sentences, start, end))))
        for start, end in found[:MAX_MARKS]
    )


def _sentences_with(text: str, sentences: Sequence[tuple[int, int]], sought: set[str]) -> list[tuple[int, int]]:
    return [each for each in sentences if sought <= _words(text[slice(*each)])]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", folded(text).casefold()))


def _sentences(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of each sentence, without white space around it. Lines end sentences, too."""
    found, start = list[tuple[int, int]](), 0
    for end, following in [*(match.span() for match in _SENTENCE_END.finditer(text)), (len(text), len(text))]:
        end += len(text[end:following].rstrip())  # closing quotes belong to the sentence
        if text[start:end].strip():
            found.append((start + len(text[start:end]) - len(text[start:end].lstrip()), end))
        start = following
    return found


def _around(sentences: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the place of the sentences that hold text[start:end]."""
    holding = [each for each in sentences if each[0] < end and start < each[1]]
    return (min(start, holding[0][0]), max(end, holding[-1][1])) if holding else (start, end)
