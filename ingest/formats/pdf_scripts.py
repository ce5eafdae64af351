"""Figures above and below the line of a page: `10^6`, `H2O`, `1987 [3]`.

PDFium gives the letters of a page in a row, and the box of each. A figure is above or below the line where its box is
smaller than that of the letter before it, and shifted. Only figures that follow a letter without a space are looked at,
for asking for a box takes longer than reading a letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import c_float
from typing import NamedTuple

from pypdfium2 import PdfPage, PdfTextPage
from pypdfium2.raw import (
    FPDF_PAGEOBJ_FORM,
    FPDF_PAGEOBJ_TEXT,
    FS_RECTF,
    FPDFPage_CountObjects,
    FPDFPage_GetObject,
    FPDFPageObj_GetType,
    FPDFText_GetCharIndexFromTextIndex,
    FPDFText_GetFontSize,
    FPDFText_GetLooseCharBox,
    FPDFTextObj_GetFontSize,
)

from ragkv.ingest.formats.scripts import END, SUB, SUP, resolved

_SMALLER, _SHIFTED, _NEAR = 0.92, 0.1, 0.5
"""Height of a figure as a share of that before it, its shift, and its distance, as shares of that height."""
_UNIT = 1.5
"""Size of a font up to which it says nothing, for the page scales it."""
MOST_OBJECTS = 500
"""Objects of a page that are asked for their sizes before its letters are."""
_SPACE = 0.15
"""Distance of two letters from which on a space is between them, as a share of the height of a line."""
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
    """Figures off the line: their first and last letter, what they are, and what is between them and what goes on.

    There is nothing that goes on in their line where `between` is None.
    """

    start: int
    end: int
    mark: str
    between: str | None


def with_scripts(page: PdfPage) -> str:
    """Return the text of a page, with marks of what is above or below the line resolved."""
    painted = page.get_textpage()
    text: str = painted.get_text_bounded()
    if not _has_sizes(page):
        return text
    letters: str = painted.get_text_range()
    if not letters.isascii() and len(letters.encode("utf-16-le", errors="replace")) != 2 * len(letters):
        return text  # places of letters are those of UTF-16
    found = list(_scripts(painted, letters))
    if not found or letters.translate(_NO_LETTERS) != text.translate(_NO_LETTERS):
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
        if script.between is not None and count < len(places):
            parts.append(" " if " " in text[end : places[count]] else script.between)
            done = places[count]
    return resolved("".join([*parts, text[done:]]))


def _has_sizes(page: PdfPage) -> bool:
    """Whether letters of several sizes may be on a page. Asking for its objects takes less than asking for letters."""
    seen, size = 0.0, c_float()
    for at in range(min(FPDFPage_CountObjects(page), MOST_OBJECTS)):
        painted = FPDFPage_GetObject(page, at)
        kind = FPDFPageObj_GetType(painted)
        if kind == FPDF_PAGEOBJ_FORM:
            return True
        if kind == FPDF_PAGEOBJ_TEXT:
            FPDFTextObj_GetFontSize(painted, size)
            if size.value <= _UNIT or (seen and abs(size.value - seen) > 0.01 * seen):
                return True
            seen = size.value
    return bool(FPDFPage_CountObjects(page) > MOST_OBJECTS)


def _scripts(page: PdfTextPage, letters: str) -> Iterator[_Script]:
    """Yield the figures that are off the line."""
    boxes = _Boxes(page, letters)
    for match in _FIGURES.finditer(letters):
        start, end = match.span()
        before = _before(letters, start)
        if before >= 0 and letters[before + 1] == "\r" and not boxes.are_near(before, start):
            before = -1  # the figures begin a line
        if before < 0:
            if end - start == 1:
                continue
            before = start
        if boxes.are_alike(before, end - 1):
            continue
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
            yield _Script(first, end, mark, _between(boxes, letters, end, base, last))


def _before(letters: str, start: int) -> int:
    """Return the place of the letter that figures follow, across a sign or a break that a script makes; -1 for none."""
    at = start - 1
    if at >= 1 and letters[at] in _SIGNS:
        at -= 1
    if at >= 2 and letters[at - 1 : at + 1] == "\r\n":
        at -= 2
    return at if at >= 0 and not letters[at].isspace() and letters[at] not in "\x02\ufffe" else -1


def _between(boxes: _Boxes, letters: str, end: int, base: _Box, last: _Box) -> str | None:
    """Return what stands behind figures where the line of their base goes on, though a break follows; else None."""
    if letters[end : end + 2] != "\r\n":
        return None
    at = end + 2
    while at < len(letters) and letters[at] == " ":
        at += 1
    if at >= len(letters) or letters[at].isspace():
        return None
    box = boxes.at(at)
    if abs(box.bottom - base.bottom) >= _SHIFTED * base.height or box.left <= last.right - _NEAR * base.height:
        return None
    return " " if box.left > last.right + _SPACE * base.height else ""


def _mark(base: _Box, box: _Box, most: float = _SMALLER) -> str:
    """Return the mark of a letter that is off the line of a base; empty for one that is on it."""
    if base.height <= 0 or not 0.3 * base.height < box.height < most * base.height:
        return ""
    if box.bottom > base.bottom + _SHIFTED * base.height and box.bottom < base.top:
        return SUP
    return SUB if box.bottom < base.bottom - 0.02 * base.height and box.top > base.bottom else ""


class _Boxes:
    """The boxes of the letters of a page, by their places in its text."""

    def __init__(self, page: PdfTextPage, letters: str):
        self._page, self._rect = page.raw, FS_RECTF()
        last = len(letters) - 1
        self._is_plain = last < 0 or FPDFText_GetCharIndexFromTextIndex(self._page, last) == last

    def at(self, place: int) -> _Box:
        rect = self._rect
        FPDFText_GetLooseCharBox(self._page, self._index(place), rect)
        return _Box(rect.left, rect.bottom, rect.right, rect.top)

    def are_alike(self, place: int, other: int) -> bool:
        """Whether two letters are of one size, as far as their fonts say."""
        size = FPDFText_GetFontSize(self._page, self._index(place))
        return bool(size > _UNIT and size == FPDFText_GetFontSize(self._page, self._index(other)))

    def are_near(self, place: int, other: int) -> bool:
        """Whether one letter follows another in a line, whatever their heights are."""
        box, following = self.at(place), self.at(other)
        return box.bottom < following.top and following.bottom < box.top and following.left > box.left

    def _index(self, place: int) -> int:
        return place if self._is_plain else int(FPDFText_GetCharIndexFromTextIndex(self._page, place))
