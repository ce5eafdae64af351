"""Figures above and below the line of a page: `10^6`, `H2O`, `1987 [3]`.

PDFium gives the letters of a page in a row, and the box of each. A figure is above or below the line where its box is
smaller than that of the letter before it, and shifted. Only figures that follow a letter without a space are looked at,
for asking for a box takes longer than reading a letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pypdfium2 import PdfTextPage
from pypdfium2.raw import FS_RECTF, FPDFText_GetCharIndexFromTextIndex, FPDFText_GetLooseCharBox

from ingest.formats.scripts import END, SUB, SUP, resolved

_SMALLER, _SHIFTED, _NEAR = 0.92, 0.1, 0.5
"""Height of a figure as a share of that before it, its shift, and its distance, as shares of that height."""
_SIGN = 2.0
"""The same for a sign, which may be of another font."""
_FIGURES = re.compile(r"[0-9]+")
_SIGNS = "-−–+"
_NO_LETTERS = str.maketrans("", "", " \t\r\n\xa0\x02\ufffe")


class _Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    @property
    def height(self) -> float:
        return self.top - self.bottom


class _Script(NamedTuple):
    """Figures off the line: their first and last letter, what they are, and whether the text goes on in their line."""

    start: int
    end: int
    mark: str
    goes_on: bool


def with_scripts(page: PdfTextPage) -> str:
    """Return the text of a page, with marks of what is above or below the line resolved."""
    text: str = page.get_text_bounded()
    letters: str = page.get_text_range()
    if not letters.isascii() and len(letters.encode("utf-16-le", errors="replace")) != 2 * len(letters):
        return text  # places of letters are those of UTF-16
    found = list(_scripts(page, letters))
    bare = letters.translate(_NO_LETTERS)
    if not found or bare != text.translate(_NO_LETTERS):
        return text
    # Both texts have the same letters, and differ in the white space between them.
    places = [at for at, letter in enumerate(text) if letter not in " \t\r\n\xa0\x02\ufffe"]
    parts, done, count, at = list[str](), 0, 0, 0
    for script in found:
        count += len(letters[at : script.start].translate(_NO_LETTERS))
        size = len(letters[script.start : script.end].translate(_NO_LETTERS))
        at = script.end
        start, end = places[count], places[count + size - 1] + 1
        count += size
        parts += [text[done:start].rstrip("\r\n"), script.mark, letters[script.start : script.end], END]
        done = end
        if script.goes_on and count < len(places):
            gap = text[end : places[count]]
            parts.append(" " if " " in gap else "")
            done = places[count]
    return resolved("".join([*parts, text[done:]]))


def _scripts(page: PdfTextPage, letters: str) -> Iterator[_Script]:
    """Yield the figures that are off the line."""
    boxes = _Boxes(page)
    for match in _FIGURES.finditer(letters):
        start, end = match.span()
        before = _before(letters, start)
        if before < 0:
            if end - start == 1:
                continue
            before = start
        base, last = boxes.at(before), boxes.at(end - 1)
        mark = _mark(base, last)
        if not mark:
            continue
        first = start if before < start else start + 1
        while first < end - 1 and _mark(base, boxes.at(first)) != mark:
            first += 1
        neighbour = before if first == start else first - 1
        if first == start and letters[start - 1] in _SIGNS and _mark(base, boxes.at(start - 1), _SIGN) == mark:
            first -= 1
        if boxes.at(first).left - boxes.at(neighbour).right < _NEAR * base.height:
            yield _Script(first, end, mark, _goes_on(boxes, letters, end, base, last))


def _before(letters: str, start: int) -> int:
    """Return the place of the letter that figures follow, across a sign or a break that a script makes; -1 for none."""
    at = start - 1
    if at >= 1 and letters[at] in _SIGNS:
        at -= 1
    elif at >= 2 and letters[at - 1 : at + 1] == "\r\n":
        at -= 2
    return at if at >= 0 and not letters[at].isspace() and letters[at] not in "\x02\ufffe" else -1


def _goes_on(boxes: _Boxes, letters: str, end: int, base: _Box, last: _Box) -> bool:
    """Whether the line of a base goes on behind figures, though a break follows them."""
    if letters[end : end + 2] != "\r\n":
        return False
    at = end + 2
    while at < len(letters) and letters[at] == " ":
        at += 1
    if at >= len(letters) or letters[at].isspace():
        return False
    box = boxes.at(at)
    return abs(box.bottom - base.bottom) < _SHIFTED * base.height and box.left > last.right - _NEAR * base.height


def _mark(base: _Box, box: _Box, most: float = _SMALLER) -> str:
    """Return the mark of a letter that is off the line of a base; empty for one that is on it."""
    if base.height <= 0 or not 0.3 * base.height < box.height < most * base.height:
        return ""
    if box.bottom > base.bottom + _SHIFTED * base.height and box.bottom < base.top:
        return SUP
    return SUB if box.bottom < base.bottom - 0.02 * base.height and box.top > base.bottom else ""


class _Boxes:
    """The boxes of the letters of a page."""

    def __init__(self, page: PdfTextPage):
        self._page, self._rect = page.raw, FS_RECTF()

    def at(self, place: int) -> _Box:
        """Return the box of a letter by its place in the text."""
        rect = self._rect
        FPDFText_GetLooseCharBox(self._page, FPDFText_GetCharIndexFromTextIndex(self._page, place), rect)
        return _Box(rect.left, rect.bottom, rect.right, rect.top)
