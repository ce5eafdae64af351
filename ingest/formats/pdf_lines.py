"""The lines of a page of a PDF to paragraphs: where a sentence or a word goes on, lines are joined.

A page says where letters are painted, and not what is a word or a paragraph. A line goes on in the next one

    that begins in lower case        unless it ends a sentence
    that begins with a digit         behind a word that needs one: `the value is`, `in the year`
    that begins with a capital       where it fills the column and ends neither a sentence nor a row of a table

A hyphen at the end of a line is kept where it belongs to the word: `X-200`, `Anne-Marie`, `self-service`, and in
addresses. A word that the document has elsewhere says how it is spelt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ragkv.ingest.formats.base import without_headings

BROKEN = "\x02"
"""What PDFium gives for a hyphen at the end of a line, whose halves it joins."""
_ITEM = re.compile(r"(?:[-*•‣▪◦–—]|\(?(?:\d{1,3}|[A-Za-z]|[ivx]{2,4})[.)])\s")
_LETTERED = re.compile(r"\(?(?:[a-z]|[ivx]{2,4})(?:\)\s|\.\s[A-Z])")
"""What begins an item in lower case: `b) rope`, `b. Rope`."""
_REST = re.compile(r"[\w-]+[/=?&#%.][\w/]")
"""What an address goes on with."""
_WORDS = re.compile(r"[^\W\d_]+(?:[-‐‑][^\W\d_]+)*")
_SPELT = re.compile(r"[\w-]{3,}")
_BROKEN_WORD = re.compile(r"\b([^\W\d_]{1,40})‐\n([^\W\d_]{1,40})")
_FIRST = re.compile(r"\S+")
_FIGURE = re.compile(r"\d")
_NEEDS_MORE = set(
    "a about above after an and are as at before below between by de der die du for from had has have in into is la le "
    "more most no not of on only or over per than that the their this to total under until up von was were which with "
    "year about almost nearly page pages chapter section figure table number".split()
)
"""Words that end no line of their own: what they speak of follows."""
_STATING = {"is", "are", "was", "were", "than", "year"}
"""Those behind which a number stands that is alone in its line."""
_KEPT_BEHIND = {"self", "well", "non", "half", "all", "ill", "quasi", "vice", "twenty", "thirty", "forty", "fifty"}
_KEPT_BEHIND |= {"sixty", "seventy", "eighty", "ninety", *"eitxunpkqz"}
_KEPT_BEFORE = {
    "based",
    "free",
    "known",
    "term",
    "level",
    "scale",
    "specific",
    "style",
    "related",
    "driven",
    "oriented",
}
_KEPT_BEFORE |= {"aware", "friendly", "old", "of", "the", "and", "to", "in", "on", "law", "made"}
_ENDS = ".!?:;…"
_NARROW, _FULL, _LOWER = 40, 0.9, 0.25
"""Characters of a line from which on a column is wide, share of it that a full line fills, and share of lines in lower
case that makes text of a narrower one."""
_VERSE = 60
_LONGEST = 80
"""Characters of a word or an address that are looked at."""


class Spelling:
    """How a document spells words that it breaks somewhere.

    Attributes:
        words: Its words in lower case, with and without hyphens.
        marks_breaks: Whether it has another hyphen for words that were broken, so that a plain one is of the word.
    """

    def __init__(self, pages: Iterable[str]):
        self.words = set[str]()
        self.marks_breaks = False
        for page in pages:
            self.words.update(_SPELT.findall(page.lower()))
            if "‐\n" in page:
                self.marks_breaks = True
                self.words.update(f"{left}{right}".lower() for left, right in _BROKEN_WORD.findall(page))

    def is_kept(self, left: str, right: str, hyphen: str) -> bool:
        """Whether the hyphen between two halves of a word is a part of it.

        Args:
            left: The text before it.
            right: The text behind it.
            hyphen: The character.
        """
        token = left[max(left.rfind(" "), left.rfind("\n"), len(left) - _LONGEST) + 1 :]
        rest = match[0] if (match := _FIRST.match(right[:_LONGEST])) else ""
        first, last = rest[:1], token[-1:]
        if not token or not rest or last.isdigit() or first.isdigit() or not first.isalpha():
            return True
        if "/" in token or "@" in token or "www." in token or "/" in rest or "@" in rest:
            return True
        before, behind = _word_at_end(token), match[0] if (match := _WORDS.match(rest)) else ""
        if f"{before}-{behind}".lower() in self.words:
            return True
        if f"{before}{behind}".lower() in self.words:
            return False
        if first.isupper() or "-" in before or "-" in behind or (len(before) == 1 and before.isupper()):
            return True
        if before.lower() in _KEPT_BEHIND or behind in _KEPT_BEFORE:
            return True
        return hyphen == BROKEN and self.marks_breaks


def flow(page: str, spelling: Spelling | None = None) -> str:
    """Join the lines of a page where a sentence or a word goes on. spelling: of the document."""
    lines = [line.strip() for line in page.split("\n")]
    if spelling is None:
        spelling = Spelling((page,) if BROKEN in page or any(map(_is_broken, lines)) else ())
    column = _Column(lines)
    parts, before = list[str](), ""
    for at, line in enumerate(lines):
        if not before or not line:
            parts += ["\n", line]
        elif _is_broken(before):
            kept = spelling.is_kept(before[:-1], line, before[-1])
            parts[-1] = parts[-1] if kept else parts[-1][:-1]
            parts.append(line)
            line = _token(before[:-1]) + ("-" if kept else "") + line
        elif _is_address(before, line):
            parts.append(line)
        elif column.goes_on(before, line) and not _is_verse(lines[max(0, at - 2) : at + 2], at):
            parts += [_space(before, line), line]
        else:
            parts += ["\n", line]
        before = line
    whole = "".join(parts).strip()
    return without_headings(_mended(whole, spelling) if BROKEN in whole else whole)


def _mended(text: str, spelling: Spelling) -> str:
    """Put in or leave out the hyphens where PDFium has joined the halves of words."""
    first, *others = text.split(BROKEN)
    parts, last = [first], first
    for other in others:
        if last and other and spelling.is_kept(last, other, BROKEN):
            parts.append("-")
            last = f"{_token(last)}-{other}"
        else:
            last = _token(last) + other
        parts.append(other)
    return "".join(parts)


class _Column:
    """The lines of a page, as wide as most of them are."""

    def __init__(self, lines: Sequence[str]):
        filled = [line for line in lines if line]
        lengths = sorted(map(len, filled))
        self._width = lengths[len(lengths) * 9 // 10] if lengths else 0
        lower = sum(line[:1].islower() for line in filled)
        upper = sum(line[:1].isupper() for line in filled)
        is_verse = self._width <= _VERSE and len(filled) > 3 and upper >= 0.8 * len(filled)
        self._is_text = not is_verse and (self._width >= _NARROW or lower >= _LOWER * len(filled))

    def goes_on(self, above: str, below: str) -> bool:
        """Whether a line goes on in the next one."""
        first = below[:1]
        if first.islower():
            if above[-1] in ".!?:":
                return False
            begin = below[:6]
            if (")" in begin or "." in begin) and _LETTERED.match(below) and above.count("(") <= above.count(")"):
                return False
            return not (below[-1].isdigit() and above[-1].isdigit() and _is_row(below) and _is_row(above))
        if above[-1] in _ENDS:
            return False
        word = above[above.rfind(" ") + 1 :]
        needs_more = word in _NEEDS_MORE and " " in above
        if first.isdigit() and above.endswith((" -", " −", "–")):
            return True
        if below.isdigit() and word not in _STATING:  # the number of the page
            return False
        if first.isdigit() and needs_more and not _is_row(below):
            return True
        if not self._is_text or _ITEM.match(below) or not (first.isalnum() or first in "\"'“‘«(["):
            return False
        space = below.find(" ")
        is_full = len(above) + 1 + (len(below) if space < 0 else space) > _FULL * self._width
        goes_on = (is_full and len(above) > 0.5 * self._width) or (needs_more and first.isupper())
        return goes_on and not _is_row(above) and not _is_row(below)


def _is_verse(lines: Sequence[str], at: int) -> bool:
    """Whether a line and those around it begin with a capital each, as few lines of sentences do.

    A first line of half the length is a heading, and says nothing.
    """
    return at > 1 and 2 * len(lines[0]) > len(lines[1]) and all(line[:1].isupper() for line in lines if line)


def _is_address(above: str, below: str) -> bool:
    """Whether an address goes on in the next line. What follows a full stop has a path, unlike a sentence."""
    if above[-1] not in "/.=?&_%#" or not ("://" in (token := _token(above)) or token.startswith("www.")):
        return False
    rest = below[:_LONGEST].split(" ", 1)[0]
    return _REST.match(rest) is not None and (above[-1] != "." or "/" in rest)


def _is_broken(line: str) -> bool:
    """Whether a line ends in a hyphen that may break a word."""
    return line[-1:] in ("-", "‐", "\xad", BROKEN) and line[-2:-1].isalnum()


def _is_row(line: str) -> bool:
    """Whether a line is one of a table or of contents: most of it is figures, or dots lead to them."""
    if "...." in line or ". . ." in line:
        return True
    if not _FIGURE.search(line):
        return False
    words = line.split()
    figures = sum(word[:1].isdigit() or word[-1:].isdigit() for word in words)
    return figures >= 0.4 * len(words) if figures > 2 else figures > 1 and len(words) == 3


def _token(text: str) -> str:
    """Return the characters at the end of a text that are no space, as far as a word may reach."""
    end = text[-_LONGEST:]
    return end[end.rfind(" ") + 1 :]


def _space(above: str, below: str) -> str:
    """Return what stands between two lines: nothing between a sign and its number, or in `on/off`."""
    if above[-1] == "/" and above[-2:-1].isalpha() and below[0].islower() and "." not in _token(above):
        return ""
    if above[-1] == "_" or (below[:1].isdigit() and above.endswith((" -", " −", "–"))):
        return ""
    return " "


def _word_at_end(token: str) -> str:
    """Return the word that ends a token, with the hyphens inside it."""
    at = len(token)
    while at and (token[at - 1].isalpha() or token[at - 1] in "-‐"):
        at -= 1
    return token[at:].replace("‐", "-").lstrip("-")
