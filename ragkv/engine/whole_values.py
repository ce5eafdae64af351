"""Values that a line break of the document divides, made whole.

A model that quotes spans ends its answer at the end of a line, also where the line breaks a value:

    48 | 000 crowns          groups of a number
    A-77- | 1209             a hyphen
    +44 20 7946 | 0018       a telephone number
    pump init \\ | --valve 7  a command that goes on
    Ada Maria | Brook        a name whose last word had no room in a wrapped line
    12 Quay Street | Tarn    the lines of an address, where an address was asked for

An answer that stands somewhere without such a break is whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ragkv.engine.support import WIDE

MOST_LINES = 6
"""Lines of an address."""
SHORT = 50
"""Characters of a line of an address."""

_ADDRESS = re.compile(r"\baddress\b(?<!mail address)(?<!IP address)(?<!web address)", re.IGNORECASE)
_GROUPS = re.compile(r"\n\s{0,8}\d{3}(?!\d)(?: \d{3}(?!\d))*")
_SMALL_NUMBER = re.compile(r"(?:^|[^\d.,])\d{1,3}$")
_HYPHENATED = re.compile(r"\n\s{0,8}\w[^\s,;.]*")
_TELEPHONE = re.compile(r"\+?\d[\d ()/-]{5,}")
_DIGITS = re.compile(r"\n\s{0,8}\d[\d ()/-]*(?=\n|$)")
_COMMAND = re.compile(r"[^\n\\]*(?:\\\n[^\n\\]*)+")
_LAST_NAME = re.compile(r"\n[A-ZÀ-Þ][\w'’-]*(?: [A-ZÀ-Þ][\w'’-]*)*")
_LINE = re.compile(r",?\n(?!\s*\n)[^\n]{1,50}(?=\n|$)")
_WORD = re.compile(r"\w")


def whole_value(answer: str, question: str, texts: Sequence[str]) -> str:
    """Return an answer with the rest of its value, where a line break ends it in the middle.

    Args:
        answer: Text of the answer.
        question: The question.
        texts: Texts of the passages.
    """
    found = [(text, at) for text in texts for at in _starts(text, answer)] if answer else []
    rests = [_rest(answer, question, text, at) for text, at in found]
    return f"{answer}{rests[0]}" if rests and all(rests) else answer


def _starts(text: str, answer: str) -> Iterator[int]:
    """Yield where an answer stands in a text, no part of a longer word."""
    at = text.find(answer)
    while at >= 0:
        around = text[at - 1 : at] if at else "", text[at + len(answer) : at + len(answer) + 1]
        if not any(map(_WORD.match, around)):
            yield at
        at = text.find(answer, at + len(answer))


def _rest(answer: str, question: str, text: str, at: int) -> str:
    """Return what belongs to the value behind an answer; "" where it is whole."""
    end = at + len(answer)
    for before, behind, joint in (
        (_SMALL_NUMBER.search(answer), _GROUPS, " "),
        (answer.endswith("-") and _WORD.search(answer), _HYPHENATED, ""),
        (_TELEPHONE.fullmatch(answer), _DIGITS, " "),
        (_had_no_room(answer, text, end), _LAST_NAME, " "),
    ):
        if before and (rest := behind.match(text, end)):
            return f"{joint}{rest[0].strip()}"
    if text[text.rfind("\n", 0, at) + 1 : at].strip(" \t$>#`"):
        return ""  # commands and addresses begin a line
    if rest := _COMMAND.match(text, end):
        return rest[0]
    return _address(text, end) if len(answer) <= SHORT and _ADDRESS.search(question) else ""


def _had_no_room(answer: str, text: str, end: int) -> bool:
    """Whether an answer ends in a name at the end of a line in which the next word had no room."""
    line, lines = text[text.rfind("\n", 0, end) + 1 : end], text.split("\n")
    following = text[end + 1 : end + 1 + SHORT].split(maxsplit=1)
    width = max(map(len, lines))
    return (
        bool(following)
        and width >= WIDE
        and answer.split()[-1][0].isupper()
        and len(line) + 1 + len(following[0]) > width
    )


def _address(text: str, end: int) -> str:
    """Return the further lines of an address: short ones without a sentence or a colon, up to an empty line."""
    start = end
    for _ in range(MOST_LINES - 1):
        line = _LINE.match(text, end)
        if line is None or line[0].rstrip()[-1] in ".!?:;" or ":" in line[0]:
            break
        end = line.end()
    return text[start:end]
