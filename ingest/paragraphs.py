"""Lines of one paragraph become one line where they go on: see wrapping.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

WIDE = 45
"""Characters of the longest line from which on a paragraph is taken for text that was wrapped."""
_NARROW = 25
"""Characters of the longest line up to which lines that begin with a capital are names and the like."""
VERSE = 60
"""Most characters of a line of verse."""
FULL, _NEARLY = 0.98, 0.75
_ENDS = ".!?:;…。！？"
_PAUSES = _ENDS + ",—–"
_CLOSERS = "\"'”’»)]*_"
_OPENERS = "\"'“‘«(*_¿¡"
_QUOTE = re.compile(r"(?:\s?>)++ ?")
_KEY = re.compile(r"(?:[*_]{0,2})[A-ZÀ-Þ](?:[^\W_][\w /&()-]{0,28})?:(?:[*_]{0,2})(?:\s|$)")
KEY_LENGTH = 32
_JOINING = {"and", "or", "to", "und", "oder", "bzw.", "sowie", "bis", "en", "of", "och", "eller", "og"}
"""Words between two of which the first lacks its end: `pre- and post-war`, `Sonn- und Feiertage`."""
_STAMP = re.compile(
    r"\[?\d{1,4}([-./])\d{1,2}\1\d{1,4},?[ T]{1,2}\d{1,2}:\d\d|\[?\d{1,2}:\d\d(?::\d\d)?\]?\s"
    r"|[A-Z][a-z]{2}  ?\d{1,2} \d\d:\d\d:\d\d |\[?(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL)\b"
)
"""A date, a time, or how bad it is, at the beginning of an entry in a log or of what somebody says in a chat."""
_BROKEN_WORD = re.compile(r"\b([^\W\d_]{1,40})-\n([^\W\d_]{1,40})([^\s\w-]*+)(?: |(?=\n)|\Z)")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*+")
WIDE_FROM, _WIDE_TO = "\u2e80", "\uff60"
"""First and last of the letters of Chinese and Japanese, which are two wide. Those of Korean lie between them."""


def joined(lines: Sequence[str], markdown: bool, quoted: bool) -> list[str]:
    """Return the lines of a paragraph, joined where they go on. quoted: Whether they may be a quotation."""
    if len(lines) < 2:
        return list(lines)
    bare = [_bare(line) for line in lines] if quoted else [line.strip() for line in lines]
    widths = list(map(_width, bare))
    width = max(widths)
    fills = [_fills(above, below, width) for above, below in zip(widths, bare[1:], strict=False)]
    if _is_verse(bare, width, sum(fills)):
        return list(lines)
    if not markdown and _STAMP.match(bare[0]) and any(map(_STAMP.match, bare[1:])):
        return list(lines)
    goes_on = _markdown_goes_on(bare, width) if markdown else _text_goes_on(bare, widths, fills)
    parts, out = [lines[0].rstrip() if not _is_broken(lines[0], markdown) else lines[0]], list[str]()
    for at, goes in enumerate(goes_on, 1):
        is_broken = _is_broken(lines[at], markdown)
        if not goes or _is_broken(lines[at - 1], markdown):
            out.append("".join(parts))
            parts = [lines[at] if is_broken else lines[at].rstrip()]
        else:
            parts += [between(bare[at - 1], bare[at]), _unquoted(lines[at]) if is_broken else bare[at]]
    return [*out, "".join(parts)]


def _keeps_apart(above: str, below: str, width: int) -> bool:
    """Whether a line is a field, `Name: value`, that does not belong to the sentence before it."""
    if below.find(":", 0, KEY_LENGTH + 2) < 0 or not _KEY.match(below):
        return False
    return len(above) < _NEARLY * width or _KEY.match(above) is not None


def _markdown_goes_on(bare: Sequence[str], width: int) -> Iterator[bool]:
    """Yield whether each line of a paragraph but the last goes on in the next one."""
    is_text = width >= WIDE or _ends(bare[-1]) or any(map(_is_lower, bare))
    return (is_text and not _keeps_apart(above, below, width) for above, below in pairwise(bare))


def _text_goes_on(bare: Sequence[str], widths: Sequence[int], fills: Sequence[bool]) -> Iterator[bool]:
    """Yield the same for a text without marks. fills: whether the first word of the next line had no room."""
    width = max(widths)
    is_wide = width >= WIDE
    is_even = not is_wide and _ends(bare[-1]) and sum(fills) >= 0.8 * (len(bare) - 1)
    is_even = is_even and (len(bare) < 3 or _pauses(bare) < len(bare))  # each line of a verse may end in a pause
    is_long = width >= _NARROW and len(bare) > 2
    for (above, below), above_width, is_full in zip(pairwise(bare), widths, fills, strict=False):
        if _keeps_apart(above, below, width):
            yield False
        elif is_wide and (is_full or (_ends_in_word(above) and below[:1].isalnum())):
            yield True
        elif not (is_wide or is_even) or _ends(above):
            yield False
        else:
            more = above_width >= _NEARLY * width if is_wide else is_long
            yield more or below[:1].isdigit() or _is_lower(below)


def _is_verse(bare: Sequence[str], width: int, filled: int) -> bool:
    """Whether lines are verse: short ones that begin with a capital each, though there is room for more."""
    if width > VERSE or len(bare) < 3 or not all(map(_begins_line, bare)):
        return False
    paused = _pauses(bare)
    return (len(bare) > 3 or 2 * paused >= len(bare)) and (width <= WIDE or filled < 0.8 * (len(bare) - 1))


def _pauses(bare: Sequence[str]) -> int:
    """Return how many lines end in a pause."""
    return sum(line.rstrip(_CLOSERS)[-1:] in _PAUSES for line in bare)


def between(above: str, below: str) -> str:
    """Return what stands between two lines of a text once they are one: a space, or nothing inside a word."""
    last, first = above[-1:], below[:1]
    if _is_wide(last) and _is_wide(first):
        return ""
    if _ends_in_word(above) and first.isalnum():
        return " " if below.partition(" ")[0] in _JOINING else ""
    return "" if last == "–" and above[-2:-1].isdigit() and first.isdigit() else " "


def _ends_in_word(line: str) -> bool:
    """Whether a line ends inside a word, behind a hyphen."""
    return line[-1:] in "-‐‑" and line[-2:-1].isalnum()


def _fills(above: int, below: str, width: int) -> bool:
    """Whether the first word of a line had no room in the line above, which is `above` wide."""
    word = 1 if _is_wide(below[:1]) else below.find(" ")
    return above + 1 + (_width(below) if word < 0 else word) > FULL * width


def _width(line: str) -> int:
    """Return how many letters wide a line is. Chinese and Japanese ones are two wide."""
    if line.isascii() or max(line) < WIDE_FROM:
        return len(line)
    return len(line) + sum(map(_is_wide, line))


def _is_wide(letter: str) -> bool:
    return WIDE_FROM <= letter <= "\u9fff" or "\uf900" <= letter <= _WIDE_TO


def _is_broken(line: str, markdown: bool) -> bool:
    """Whether the author says that a line ends here."""
    return markdown and (line.endswith(("  ", "\\")) or line.rstrip().endswith(("<br>", "<br/>", "<br />")))


def _bare(line: str) -> str:
    return _unquoted(line).rstrip()


def _unquoted(line: str) -> str:
    """Return a line without the marks of a quotation and white space before it."""
    quote = quote_of(line)
    return line[len(quote) :].lstrip()


def quote_of(line: str) -> str:
    match = _QUOTE.match(line) if ">" in line[:8] else None
    return match[0] if match else ""


def indent_of(line: str) -> int:
    bare = line[len(quote_of(line)) :]
    return len(bare) - len(bare.lstrip())


def _begins_line(line: str) -> bool:
    """Whether a line begins as a sentence or a verse does."""
    return line.lstrip(_OPENERS)[:1].isupper()


def _is_lower(line: str) -> bool:
    return line.lstrip(_OPENERS)[:1].islower()


def _ends(line: str) -> bool:
    """Whether a line ends as a sentence does."""
    return line.rstrip(_CLOSERS)[-1:] in _ENDS


def with_whole_words(text: str) -> str:
    """Return a text in which words that were broken at a syllable are whole, where it has them so elsewhere."""
    if not _breaks_a_word(text):
        return text
    words = set(_WORD.findall(text.lower()))

    def whole(match: re.Match[str]) -> str:
        left, right, rest = match[1], match[2], match[3]
        is_broken = f"{left}{right}".lower() in words and f"{left}-{right}".lower() not in words
        return f"{left}{right}{rest}\n" if is_broken else match[0]

    return _BROKEN_WORD.sub(whole, text)


def _breaks_a_word(text: str) -> bool:
    """Whether a line of a text ends in a letter and a hyphen, and the next one begins with a letter."""
    at = text.find("-\n")
    while at >= 0:
        if text[max(at - 1, 0)].isalpha() and text[at + 2 : at + 3].isalpha():
            return True
        at = text.find("-\n", at + 2)
    return False
