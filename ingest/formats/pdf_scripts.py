"""Text above and below the line of a page: `10^6`, `H2O`, `x_i`, `the 1st`, `1987 [3]`.

A page paints its text in pieces, each with a size and a place. A piece is above or below the line where it is smaller
than the one before it, shifted, and close to it. Pieces are fewer than letters; to look at them takes 4 to 49% of the
time of a document without it, more where many are off the line (docs/lab-notes.md).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from ctypes import addressof, c_float, c_ushort
from itertools import compress, pairwise
from typing import Any, NamedTuple

from pypdfium2 import PdfPage, PdfTextPage
from pypdfium2.raw import (
    FPDF_PAGEOBJ_FORM,
    FS_MATRIX,
    FPDFFormObj_CountObjects,
    FPDFFormObj_GetObject,
    FPDFPage_CountObjects,
    FPDFPage_GetObject,
    FPDFPageObj_GetBounds,
    FPDFPageObj_GetMatrix,
    FPDFPageObj_GetType,
    FPDFText_CountChars,
    FPDFText_GetBoundedText,
    FPDFText_GetCharIndexAtPos,
    FPDFText_GetTextIndexFromCharIndex,
    FPDFText_GetTextObject,
    FPDFText_GetUnicode,
    FPDFText_IsGenerated,
    FPDFTextObj_GetFontSize,
)

from ragkv.ingest.formats.scripts import END, SUB, SUP, resolved

_SMALLER, _SMALLEST = 0.92, 0.45
"""Size of a piece as a share of the size of its line. A letter that begins a chapter is larger than that."""
_RAISED, _LOWERED, _HALF, _NEAR = 0.15, 0.06, 0.5, 0.5
"""Least shift of a piece up and down, most shift down, and most distance from the one before, as shares of the size of
its line."""
_LONGEST = 16
"""Letters of a piece that is off the line."""
_SPACE, _FAR = 0.15, 1.5
"""Distance of two pieces from which on a space is between them, and from which on they have nothing to do with each
other, likewise."""
_UNIT = 1.5
"""Size of a font up to which it says nothing, for the page scales it."""
_AROUND = (0, -1, 1, -2, 2)
"""Letters around a place, for boxes of letters overlap."""
_DEEPEST = 8
"""Forms inside each other that are looked into."""
_BLANK = " \t\r\n\xa0\x02\ufffe\0"
_TO_NOTHING = dict.fromkeys(map(ord, _BLANK), "\0")
_VISIBLE = re.compile(f"[^{_BLANK}]")

_Matrix = tuple[float, float, float, float, float, float]
_WHOLE: _Matrix = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


class _Piece(NamedTuple):
    """Text that is painted at once: its object, the matrix around it, its size, and where its first letter stands."""

    object: Any
    around: _Matrix
    size: float
    left: float
    line: float

    def box(self) -> tuple[float, float, float, float]:
        """Return its left, bottom, right and top."""
        left, bottom, right, top = c_float(), c_float(), c_float(), c_float()
        FPDFPageObj_GetBounds(self.object, left, bottom, right, top)
        a, _, _, d, e, f = self.around
        return a * left.value + e, d * bottom.value + f, a * right.value + e, d * top.value + f


class _Script(NamedTuple):
    """A piece off the line: its first letter and the one behind it, its mark, and what white space around it is.

    `before` and `between` are None where the page says it.
    """

    start: int
    end: int
    mark: str
    before: str | None
    between: str | None


def with_scripts(page: PdfPage) -> str:
    """Return the text of a page, with marks of what is above or below the line resolved."""
    painted = page.get_textpage()
    text = _text(painted)
    pieces = _Pieces(page)
    found = dict(_off_line(pieces))
    if not found:
        return text
    letters: str = painted.get_text_range()
    if not letters.isascii() and len(letters.encode("utf-16-le", errors="replace")) != 2 * len(letters):
        return text  # places of letters are those of UTF-16
    return _written(text, letters, sorted(_scripts(painted.raw, pieces, found)))


def _text(painted: PdfTextPage) -> str:
    """Return the text inside the bounds of a page, as `get_text_bounded` does, which looks for it twice."""
    left, bottom, right, top = painted.page.get_bbox()
    room = 2 * FPDFText_CountChars(painted) + 2
    units = (c_ushort * room)()
    count = FPDFText_GetBoundedText(painted, left, top, right, bottom, units, room)
    if count >= room:
        return str(painted.get_text_bounded())
    return bytes(memoryview(units)[:count]).decode("utf-16-le", errors="ignore").removesuffix("\0")  # its end


def _written(text: str, letters: str, scripts: list[_Script]) -> str:
    """Return the text with scripts. It has the letters of `letters`, and may differ in the white space between them."""
    visible, places = _visible(letters), _visible(text)
    if len(visible) != len(places):
        return text
    parts, done, before_end = list[str](), 0, 0
    for script in scripts:
        if script.start < before_end:
            continue
        before_end = script.end
        start, last = (places[bisect_left(visible, at)] for at in (script.start, script.end - 1))
        end = last + 1
        before = text[done:start]
        parts.append(before if script.before is None else before.rstrip() + script.before)
        parts += [script.mark, text[start:end], END]
        done = end
        if script.between is not None and (following := _VISIBLE.search(text, end)):
            parts.append(script.between)
            done = following.start()
    return resolved("".join([*parts, text[done:]]))


def _visible(text: str) -> list[int]:
    """Return the places of the letters in a text that are no white space."""
    return list(compress(range(len(text)), text.translate(_TO_NOTHING).encode("latin-1", errors="replace")))


class _Pieces:
    """The text of a page in the order in which it is painted.

    Attributes:
        changes: Numbers of the pieces whose size differs from that of a neighbour.
    """

    def __init__(self, page: PdfPage):
        self._objects: list[tuple[Any, _Matrix]] = []
        self._sizes: list[float] = []
        self._known: dict[int, _Piece] = {}
        self._collect(page.raw, FPDFPage_CountObjects(page), FPDFPage_GetObject, _WHOLE, 0)
        self.changes = (
            sorted(self._changes()) if len({*self._sizes}) > 1 or min(self._sizes, default=2) <= _UNIT else []
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, number: int) -> _Piece:
        """Return a piece. Most are never asked for."""
        if number not in self._known:
            painted, around = self._objects[number]
            a, b, _, d, e, f = _matrix(painted, around)
            is_upright = a > 0 and d > 0 and abs(b) < 0.01 * a  # text that is turned is left as it is
            self._known[number] = _Piece(painted, around, self._sizes[number] * d if is_upright else 0.0, e, f)
        return self._known[number]

    def _changes(self) -> set[int]:
        sizes = self._sizes
        differ = [at for at, (size, behind) in enumerate(pairwise(sizes)) if size != behind or behind <= _UNIT]
        return {*differ, *(at + 1 for at in differ)}

    def _collect(self, parent: Any, count: int, child: Any, around: _Matrix, depth: int) -> None:
        """Add the text of a page or a form. child: (parent, number) → object."""
        size, size_of, sizes, objects = c_float(), FPDFTextObj_GetFontSize, self._sizes, self._objects
        for at in range(count):
            painted = child(parent, at)
            if size_of(painted, size):
                sizes.append(size.value)
                objects.append((painted, around))
            elif depth < _DEEPEST and FPDFPageObj_GetType(painted) == FPDF_PAGEOBJ_FORM:
                whole = _matrix(painted, around)
                self._collect(painted, FPDFFormObj_CountObjects(painted), FPDFFormObj_GetObject, whole, depth + 1)


def _matrix(painted: Any, around: _Matrix) -> _Matrix:
    """Return the matrix of an object inside another one."""
    own = FS_MATRIX()
    if not FPDFPageObj_GetMatrix(painted, own):
        return around
    a, b, c, d, e, f = own.a, own.b, own.c, own.d, own.e, own.f
    if around is _WHOLE:
        return a, b, c, d, e, f
    u, v, w, x, y, z = around
    return a * u + b * w, a * v + b * x, c * u + d * w, c * v + d * x, e * u + f * w + y, e * v + f * x + z


def _off_line(pieces: _Pieces) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield each piece that is off the line: (its number, (number of the piece on its line, mark))."""
    scripts = dict[int, int]()
    for at in pieces.changes:
        base, mark = scripts.get(at - 1, at - 1), ""
        if base >= 0 and (mark := _mark(pieces[base], pieces[at])) and not _is_near(pieces, base, at):
            mark = ""
        if not mark and at + 1 < len(pieces) and _mark(pieces[at + 1], pieces[at]) == SUP:  # of a note before its text
            base, mark = at + 1, SUP if _is_near(pieces, at, at + 1) else ""
        if mark:
            scripts[at] = base
            yield at, (base, mark)


def _mark(base: _Piece, piece: _Piece) -> str:
    """Return the mark of a piece that is off the line of a base; empty for one that is on it."""
    if not _SMALLEST * base.size < piece.size < _SMALLER * base.size:
        return ""
    shift = (piece.line - base.line) / base.size
    if _RAISED < shift < 1:
        return SUP
    return SUB if -_HALF < shift < -_LOWERED else ""


def _is_near(pieces: _Pieces, base: int, at: int) -> bool:
    """Whether a piece stands behind a base, or behind what is off the line of that base."""
    piece, most = pieces[at], _NEAR * max(pieces[base].size, pieces[at].size)
    return any(abs(piece.left - pieces[before].box()[2]) < most for before in {base, at - 1})


def _scripts(page: Any, pieces: _Pieces, found: dict[int, tuple[int, str]]) -> Iterator[_Script]:
    """Yield where in the text of a page its pieces off the line are."""
    for at, (base, mark) in found.items():
        span = _span(page, pieces[at])
        if span is None:
            continue
        start, last = (FPDFText_GetTextIndexFromCharIndex(page, place) for place in span)
        if not 0 <= start <= last:
            continue
        before = _space(page, span[0], -1) if base < at else None
        between = None
        if at + 1 < len(pieces) and (found.get(at + 1, (-1, ""))[0] == base or _is_level(pieces[base], pieces[at + 1])):
            gap = (pieces[at + 1].left - pieces[at].box()[2]) / pieces[base].size
            if -1 < gap < _FAR:
                between = _space(page, span[1], 1) or (" " if gap > _SPACE else "")
        yield _Script(start, last + 1, mark, before, between)


def _is_level(base: _Piece, piece: _Piece) -> bool:
    """Whether a piece stands on the line of a base."""
    return abs(piece.line - base.line) < _LOWERED * base.size


def _span(page: Any, piece: _Piece) -> tuple[int, int] | None:
    """Return the first and the last letter of a piece among those of its page; None for a long one."""
    left, bottom, right, top = piece.box()
    near, own = 0.2 * piece.size, addressof(piece.object.contents)
    place = FPDFText_GetCharIndexAtPos(page, min((left + right) / 2, left + near), (bottom + top) / 2, near, near)

    def is_own(at: int) -> bool:
        painted: Any = FPDFText_GetTextObject(page, at) if at >= 0 else None
        return bool(painted) and addressof(painted.contents) == own

    around = (place + step for step in _AROUND) if place >= 0 else ()
    first = last = next(filter(is_own, around), -1)
    if first < 0:
        return None
    while is_own(first - 1):
        first -= 1
    while last < first + _LONGEST and is_own(last + 1):
        last += 1
    visible = [at for at in range(first, last + 1) if chr(FPDFText_GetUnicode(page, at)) not in _BLANK]
    return (visible[0], visible[-1]) if visible and last < first + _LONGEST else None


def _space(page: Any, place: int, step: int) -> str:
    """Return a space where the page paints one before or behind a letter. Those that PDFium adds do not count."""
    at = place + step
    while at >= 0 and (letter := chr(FPDFText_GetUnicode(page, at))) in _BLANK and letter != "\0":
        if not FPDFText_IsGenerated(page, at):
            return " "
        at += step
    return ""
