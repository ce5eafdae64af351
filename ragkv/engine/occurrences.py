"""Where words stand in a text as words of their own.

A part of a number, an identifier or an address is no word: `1` does not stand in `-1`, `3.1`, `1,000`, `GREP(1)` or
`X-1`, and `zlib` does not in `zlib.h`. The parts of a range, a date and a hyphenated word are words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ragkv.normalisation import fold_with_offsets

_BETWEEN_WORDS = re.compile(r"\W")
_WORD = re.compile(r"\w+")
_WHOLES = (
    re.compile(r"(?<![\w.+-])[\w.+-]++@[\w.-]*\w"),  # an e-mail address
    re.compile(r"(?<!\w)\w++://[^\s<>\"']*[\w/]"),  # a URL
    re.compile(r"(?<![\w/.~+-])[.~]{0,2}/[\w.~+/-]*\w"),  # a path
    re.compile(r"(?<!\w)[A-Za-z](?:\+\+|#)"),  # C++, F#
    re.compile(r"(?<=\w)\(\d\w{0,3}\)|\[\d{1,3}\]"),  # a section of a manual, a note
    re.compile(r"^[ \t]{0,8}\(?\d{1,3}[.)]\s", re.MULTILINE),  # the number of an item
    re.compile(r"(?<![\w.])[^\W\d]\w*+(?:(?:\.|::)[a-z]\w*+|-\d\w*+(?:-\w++)*+)++"),  # zlib.h, X-200
    re.compile(r"(?<![\w.,)\]])[-+−–±]?\d{1,3}(?:\s\d{3}(?!\d))++(?:[.,]\d++)?+"),  # 48 000
    re.compile(r"(?<![\w/])\d++/\d++(?![\d/])"),  # a fraction
    re.compile(r"(?<![\w-])(?!\d{4}-\d\d?-\d\d?\b|\d\d?-\d\d?-\d{4}\b)\d++(?:-\d++){2,}+"),  # telephone, and no date
    re.compile(r"(?:(?<![\w.)\]])[-+−–±]|(?<!\w))\d++(?:(?:[.,:^'’]|\*\*)\d++)*+"),  # a sign, decimals, groups, a time
)
"""What is one word although it holds other characters than letters and digits."""


def occurrences(text: str, words: Sequence[str]) -> list[tuple[int, int]]:
    """Return (start, end) of each place where words stand in a text in this order, in any case.

    White space of any length may stand between them. Neither end is inside of a word, a number or an identifier.
    """
    sought, spans = _folded(" ".join(words))[0], list[tuple[int, int]]()
    folded, offsets = _folded(text)
    at = folded.find(sought) if sought else -1
    while at >= 0:
        end = at + len(sought)
        if not _is_word(folded[at - 1 : at]) and not _is_word(folded[end : end + 1]):
            spans.append((offsets[at], offsets[end]))
            at = folded.find(sought, end)
        else:  # the next place begins behind the word that holds this one's first character
            between = _BETWEEN_WORDS.search(folded, at)
            at = folded.find(sought, between.end()) if between else -1
    return _outside(spans, text) if spans else []


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text in lower case; a number, an identifier or an address is one."""
    text, _ = fold_with_offsets(text)
    found = {match.span() for each in (*_WHOLES, _WORD) for match in each.finditer(text)}
    return frozenset(text[slice(*span)].casefold() for span in _outside(list(found), text))


def _outside(spans: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Return the spans in a text of which neither end is inside of a number, an identifier or an address."""
    left = list(spans)
    for whole in _WHOLES:
        inside = {offset for match in whole.finditer(text) for offset in range(match.start() + 1, match.end())}
        if inside:
            left = [span for span in left if inside.isdisjoint(span)]
    return left


def _folded(text: str) -> tuple[str, Sequence[int]]:
    """Return a text for comparing: as search reads it, case folded, white space shortened; and where it stands.

    The offsets are of each of its characters, and of its end.
    """
    text, stands = fold_with_offsets(text)
    folded = "".join(fold if len(fold := character.casefold()) == 1 else character.lower()[0] for character in text)
    kept = [at for at, character in enumerate(folded) if not (character.isspace() and folded[at - 1 : at].isspace())]
    offsets = [*kept, len(folded)] if stands is None else stands[[*kept, len(folded)]].tolist()
    return "".join(" " if folded[at].isspace() else folded[at] for at in kept), offsets


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
