"""What passages say for an answer: which of its words, and of the question's, they hold.

Words are compared by their first letters, so that `built` and `builds` are the same. Words that name nothing (`what`,
`the`) are left out of a question. English, like the models that ship with ragkv; a question of another language has all
its words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ragkv.engine.occurrences import words_of
from ragkv.engine.word_places import STEM
from ragkv.passages import PUNCTUATION
from ragkv.retrieval.follow_up import NAMES_NOTHING

JUDGEMENTS = frozenset({"yes", "no"})
"""Answers that are no quotations."""
WIDE = 45
"""Characters of the longest line from which on a text is taken for one that was wrapped, as at ingest."""
_FIELD = re.compile(r"\w[^\n:]{0,59}: \S")
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")


def is_judgement(answer: str) -> bool:
    """Whether an answer is `yes` or `no`."""
    return answer.strip(PUNCTUATION).casefold() in JUDGEMENTS


def stems(text: str) -> frozenset[str]:
    """Return what tells of the words of a text that name something."""
    return frozenset(word[:STEM] for word in words_of(text) - NAMES_NOTHING)


def held_share(answer: str, texts: Sequence[str]) -> float:
    """Return the share of an answer's words that one passage holds, of the passage that holds most of them.

    Args:
        answer: Text of the answer.
        texts: Texts of the passages.
    """
    words = words_of(answer.strip(PUNCTUATION))
    return max((_held(words, text) / len(words) for text in texts), default=0.0) if words else 0.0


def _held(words: frozenset[str], text: str) -> int:
    """Count the words that a text holds. Scripts without spaces have no words to compare, so their runs are sought."""
    there, folded = words_of(text), text.casefold()
    beginnings = {word[:STEM] for word in there if word.isalpha()}
    return sum(
        word in there
        or (word.isalpha() and len(word) > STEM and word[:STEM] in beginnings)
        or (not word.isascii() and word in folded)
        for word in words
    )


def sentences(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of each sentence, without white space around it.

    Lines end sentences, too, unless words go on in the next one: in lower case, or because they had no room. Lines
    `column: value` below each other are a row of a table, and one sentence.
    """
    found, start, width = list[tuple[int, int]](), 0, max(map(len, text.split("\n")))
    for end, following in [*(match.span() for match in _SENTENCE_END.finditer(text)), (len(text), len(text))]:
        if text[end:following] == "\n" and (_goes_on(text, end, width) or _is_row(text, end)):
            continue
        end += len(text[end:following].rstrip())  # closing quotes belong to the sentence
        if text[start:end].strip():
            found.append((start + len(text[start:end]) - len(text[start:end].lstrip()), end))
        start = following
    return found


def _goes_on(text: str, end: int, width: int) -> bool:
    """Whether a sentence goes on behind the line that ends there. width: of the longest line."""
    following, line = text[end + 1 : end + 1 + width], end - text.rfind("\n", 0, end) - 1
    if text[end - 1 : end] in ".!?:;…" or not following[:1].isalnum():
        return False
    return following[0].islower() or (width >= WIDE and line + 1 + len(following.split(maxsplit=1)[0]) > width)


def _is_row(text: str, end: int) -> bool:
    """Whether the lines before and behind a line end are of a row."""
    return bool(_FIELD.match(text, text.rfind("\n", 0, end) + 1) and _FIELD.match(text, end + 1))


def deciding_sentence(question: str, texts: Sequence[str]) -> tuple[int, int, int] | None:
    """Return the sentence that holds most of what a question asks, where it decides a question with yes or no.

    Args:
        question: The question.
        texts: Texts of the passages.

    Returns:
        Number of the text, start and end of the sentence; None where no sentence holds two thirds of the words.
    """
    sought, best, found = stems(question), 2 / 3, None
    for number, text in enumerate(texts):
        for start, end in sentences(text):
            share = len(sought & stems(text[start:end])) / len(sought) if sought else 0.0
            if share > best or (share == best and found is None):
                best, found = share, (number, start, end)
    return found
