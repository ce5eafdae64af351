"""The sections of a number format: what stands before, between and behind the digits of a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

_PART = re.compile(
    r'"([^"]*+)"|\\(.)|_.|\*.|\[([^\[\]]*+)\]|([0#?]+)|(E[+-])|(general)|(am/pm|a/p)|([ymdhse]+)|(.)', re.I | re.S
)
_CONDITION = re.compile(r"(<=|>=|<>|<|>|=)\s*(-?[\d.]+)")
_PLACE = re.compile("[0-9#?]")
_WORD = re.compile(r"([^\W\d_])(?!\1)[^\W\d_]")
"""A part of a word, as letters of an era or of a date of another language (`ggg`, `JJJJ`), and `年`, are none."""
_ELAPSED = re.compile(r"h+|m+|s+", re.IGNORECASE)


class Section:
    """A part of a format.

    Attributes:
        kind: `general`, `number`, `date`, `elapsed`, `text` (only words), or `hidden`.
        before, behind: Words around the number.
        whole, decimals, exponent, divisor: Its digits: placeholders before and behind the point, of the exponent, and
            below the line of a fraction.
        blanks: Placeholders and the words between them, where there are such words.
        dates: The letters of a date or a time.
        spans: Words and letters of a time in turn.
        parts: How many digits a second has behind its point.
        percents, thousands: How often the number is taken times 100 and divided by 1000.
        condition: Which numbers it is for, if it says so.
        said: Words before and behind a date; None where there are none.
        has_text: Whether it is for text, too.
        has_plus: Whether it shows the sign of an exponent that is not negative.
        is_simple: Whether its digits are nothing but a number of zeros.
    """

    def __init__(self, kind: str = "text"):
        self.kind = kind
        self.before = self.behind = self.whole = self.exponent = self.divisor = self.dates = ""
        self.decimals: str | None = None
        self.blanks: list[str] = []
        self.spans: list[str] = []
        self.parts = self.percents = self.thousands = 0
        self.condition: tuple[str, float] | None = None
        self.said: tuple[str, str] | None = None
        self.has_text = self.has_plus = self.is_simple = False


def split_format(code: str) -> Iterator[str]:
    """Yield the sections of a format."""
    start = 0
    for match in _PART.finditer(code):
        if match[0] == ";":
            yield code[start : match.start()]
            start = match.end()
    yield code[start:]


def read_section(code: str) -> Section:
    """Read a section."""
    if not code:
        return Section("hidden")
    section, words, digits = Section(), list[str](), False
    for match in _PART.finditer(code):
        quoted, escaped, bracket, holders, exponent, general, noon, letters, other = match.groups()
        if bracket is not None:
            words.append(_bracket(section, bracket))
            if section.dates and not section.spans:
                section.spans = ["".join(words), section.dates]
                words.clear()
        elif holders:
            _hold(section, holders, words, digits)
            digits = True
        elif exponent:
            section.exponent, section.has_plus = "0", exponent[1] == "+"
        elif general:
            section.kind, section.before, words = "general", "".join(words), []
        elif letters and not digits:
            section.kind = "elapsed" if section.kind == "elapsed" else "date"
            section.dates += letters.lower()
            section.spans += ["".join(words), letters.lower()]
            words.clear()
        elif other == "." and digits and section.decimals is None:
            section.decimals = ""
        elif other == "," and digits:
            section.thousands += 1
        elif other == "%":
            section.percents += 1
            words.append("%")
        elif other == "/" and digits and _PLACE.match(code, match.end()):
            section.divisor = "/"
        elif section.divisor and other and other in "0123456789":
            section.divisor = section.divisor.strip("/") + other
        elif other == "@":
            section.has_text = True
            section.before, words = "".join(words), []
        else:
            words.append(quoted or escaped or letters or (other if not noon else "") or "")
    _finish(section, "".join(words), digits)
    return section


def _bracket(section: Section, text: str) -> str:
    """Take what brackets say, and return the sign of a currency."""
    if _ELAPSED.fullmatch(text):
        section.kind = "elapsed"
        section.dates += text.lower()
    elif condition := _CONDITION.fullmatch(text):
        with suppress(ValueError):
            section.condition = condition[1], float(condition[2])
    return text[1:].partition("-")[0] if text.startswith("$") else ""


def _hold(section: Section, holders: str, words: list[str], digits: bool) -> None:
    """Take placeholders of digits. words: those since the last ones, which are emptied."""
    if section.decimals is None:
        section.thousands = 0  # commas between digits group them
    if section.kind in ("date", "elapsed"):
        if words and words[-1] in (".", ","):  # parts of a second
            words.pop()
            section.parts = len(holders)
        return
    section.kind = "number"
    if not digits:
        section.before = "".join(words)
    elif section.exponent:
        section.exponent = holders
    elif section.divisor:
        section.divisor = section.divisor.strip("/") + holders
    elif section.decimals is not None:
        section.decimals += holders
    else:
        section.blanks += [section.whole, "".join(words)] if not section.blanks else ["".join(words)]
        section.blanks.append(holders)
        section.whole += holders
        words.clear()
        return
    if not digits:
        section.whole = holders
    words.clear()


def _finish(section: Section, words: str, digits: bool) -> None:
    """Take the words behind everything else."""
    if section.kind == "text" and not section.has_text:
        section.before, section.kind = section.before + words, "text" if (section.before + words) else "hidden"
    else:
        is_even = section.decimals == "" and words[:1] in ("-", "–", "—")  # a price: `5.-`
        section.behind = f".{words}" if is_even else words
    if section.kind == "date":
        before, behind = (side if _WORD.search(side) else "" for side in (section.spans[0], section.behind))
        section.said = (before, behind) if before or behind else None
    if not any(section.blanks[1::2]):
        section.blanks = []
    scaled = section.percents or section.thousands or section.exponent or section.divisor or section.blanks
    section.is_simple = not scaled and section.whole.endswith("0") and not (section.decimals or "").strip("0")
