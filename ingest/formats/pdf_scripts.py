"""Text above and below the line of a page: `10^6`, `H2O`, `x_i`, `the 1st`, `1987 [3]`.

A page paints its text in pieces, each with a size and a place. A piece is above or below the line where it is smaller
than the one before it, shifted, and close to it. Pieces are fewer than letters; to look at them takes 4 to 49% of the
time of a document without it, more where many are off the line (docs/lab-notes.md).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from ctypes import PYFUNCTYPE, addressof, c_float, c_int, c_ulong, c_ushort, c_void_p, cast
from itertools import compress, pairwise, repeat
from typing import Any, NamedTuple

from pypdfium2 import PdfPage, PdfTextPage, raw

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


def _by_address(function: Any, result: Any, *arguments: Any) -> Any:
    """Return a function of PDFium that takes and returns addresses. Called for each object, it takes half the time."""
    return PYFUNCTYPE(result, *arguments)(cast(function, c_void_p).value or 0)


_CHILD_OF_PAGE = _by_address(raw.FPDFPage_GetObject, c_void_p, c_void_p, c_int)
_CHILD_OF_FORM = _by_address(raw.FPDFFormObj_GetObject, c_void_p, c_void_p, c_ulong)
_CHILDREN = _by_address(raw.FPDFFormObj_CountObjects, c_int, c_void_p)
_KIND = _by_address(raw.FPDFPageObj_GetType, c_int, c_void_p)
_FONT_SIZE = _by_address(raw.FPDFTextObj_GetFontSize, c_int, c_void_p, c_void_p)
_MATRIX = _by_address(raw.FPDFPageObj_GetMatrix, c_int, c_void_p, c_void_p)
_BOUNDS = _by_address(raw.FPDFPageObj_GetBounds, c_int, c_void_p, *[c_void_p] * 4)
_OBJECT_OF_LETTER = _by_address(raw.FPDFText_GetTextObject, c_void_p, c_void_p, c_int)


class _Piece(NamedTuple):
    """Text that is painted at once: its object, the matrix around it, its size, and where its first letter stands."""

    object: int
    around: _Matrix
    size: float
    left: float
    line: float

    def box(self) -> tuple[float, float, float, float]:
        """Return its left, bottom, right and top."""
        bounds = (c_float * 4)()
        start = addressof(bounds)
        _BOUNDS(self.object, start, start + 4, start + 8, start + 12)
        left, bottom, right, top = bounds
        a, _, _, d, e, f = self.around
        return a * left + e, d * bottom + f, a * right + e, d * top + f


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
    room = 2 * raw.FPDFText_CountChars(painted) + 2
    units = (c_ushort * room)()
    count = raw.FPDFText_GetBoundedText(painted, left, top, right, bottom, units, room)
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
        known: These and their neighbours, by number.
    """

    def __init__(self, page: PdfPage):
        self._objects: list[int] = []
        self._arounds: list[_Matrix] = []
        self._sizes: list[float] = []
        self._collect(addressof(page.raw.contents), raw.FPDFPage_CountObjects(page), _CHILD_OF_PAGE, _WHOLE, 0)
        sizes, count = self._sizes, len(self._sizes)
        has_changes = len({*sizes}) > 1 or min(sizes, default=2) <= _UNIT
        differ = {at for at, (size, behind) in enumerate(pairwise(sizes)) if size != behind or behind <= _UNIT}
        self.changes = sorted({*differ, *(at + 1 for at in differ)}) if has_changes else []
        near = {number for at in self.changes for number in (at - 1, at, at + 1) if 0 <= number < count}
        self.known = dict(zip(near, self._placed(list(near)), strict=True))

    def _placed(self, numbers: list[int]) -> Iterator[_Piece]:
        """Yield pieces with their places."""
        objects, arounds = [self._objects[at] for at in numbers], [self._arounds[at] for at in numbers]
        for at, painted, around, matrix in zip(numbers, objects, arounds, _matrices(objects, arounds), strict=True):
            a, b, _, d, e, f = matrix
            is_upright = a > 0 and d > 0 and abs(b) < 0.01 * a  # text that is turned is left as it is
            yield _Piece(painted, around, self._sizes[at] * d if is_upright else 0.0, e, f)

    def _collect(self, parent: int, count: int, child: Any, around: _Matrix, depth: int) -> None:
        """Add the text of a page or a form. child: (parent, number) → object."""
        objects: list[int] = list(map(child, repeat(parent), range(count)))
        sizes = (c_float * count)()
        is_text: list[int] = list(map(_FONT_SIZE, objects, range(addressof(sizes), addressof(sizes) + 4 * count, 4)))
        start = 0
        for at in compress(range(count), map((0).__eq__, is_text)) if depth < _DEEPEST else ():
            if _KIND(objects[at]) == raw.FPDF_PAGEOBJ_FORM:
                self._add(objects[start:at], sizes[start:at], is_text[start:at], around)
                start, form = at, objects[at]
                self._collect(form, _CHILDREN(form), _CHILD_OF_FORM, next(_matrices([form], [around])), depth + 1)
        self._add(objects[start:], sizes[start:], is_text[start:], around)

    def _add(self, objects: list[int], sizes: list[float], is_text: list[int], around: _Matrix) -> None:
        """Add the objects of a page or a form that are text."""
        self._objects += compress(objects, is_text)
        self._sizes += compress(sizes, is_text)
        self._arounds += [around] * (len(self._objects) - len(self._arounds))


def _matrices(objects: Sequence[int], arounds: Sequence[_Matrix]) -> Iterator[_Matrix]:
    """Yield the matrices of objects inside others."""
    values = (c_float * (6 * len(objects)))()
    places = range(addressof(values), addressof(values) + 24 * len(objects), 24)
    has_own: list[int] = list(map(_MATRIX, objects, places))
    numbers = iter(values[:])
    for has, around, own in zip(has_own, arounds, zip(*[numbers] * 6, strict=True), strict=True):
        if not has or around is _WHOLE:
            yield own if has else around
            continue
        (a, b, c, d, e, f), (u, v, w, x, y, z) = own, around
        yield a * u + b * w, a * v + b * x, c * u + d * w, c * v + d * x, e * u + f * w + y, e * v + f * x + z


def _off_line(pieces: _Pieces) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield each piece that is off the line: (its number, (number of the piece on its line, mark))."""
    scripts, known = dict[int, int](), pieces.known
    for at in pieces.changes:
        base, mark, piece = scripts.get(at - 1, at - 1), "", known[at]
        if base >= 0 and (mark := _mark(known[base], piece)) and not _is_near(pieces, base, at):
            mark = ""
        if not mark and at + 1 in known and _mark(known[at + 1], piece) == SUP:  # of a note before its text
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
    known = pieces.known
    piece, most = known[at], _NEAR * max(known[base].size, known[at].size)
    return any(abs(piece.left - known[before].box()[2]) < most for before in {base, at - 1})


def _scripts(page: Any, pieces: _Pieces, found: dict[int, tuple[int, str]]) -> Iterator[_Script]:
    """Yield where in the text of a page its pieces off the line are."""
    known = pieces.known
    for at, (base, mark) in found.items():
        span = _span(page, known[at])
        if span is None:
            continue
        start, last = (raw.FPDFText_GetTextIndexFromCharIndex(page, place) for place in span)
        if not 0 <= start <= last:
            continue
        before = _space(page, span[0], -1) if base < at else None
        between = None
        if at + 1 in known and (found.get(at + 1, (-1, ""))[0] == base or _is_level(known[base], known[at + 1])):
            gap = (known[at + 1].left - known[at].box()[2]) / known[base].size
            if -1 < gap < _FAR:
                between = _space(page, span[1], 1) or (" " if gap > _SPACE else "")
        yield _Script(start, last + 1, mark, before, between)


def _is_level(base: _Piece, piece: _Piece) -> bool:
    """Whether a piece stands on the line of a base."""
    return abs(piece.line - base.line) < _LOWERED * base.size


def _span(page: Any, piece: _Piece) -> tuple[int, int] | None:
    """Return the first and the last letter of a piece among those of its page; None for a long one."""
    left, bottom, right, top = piece.box()
    near, address = 0.2 * piece.size, addressof(page.contents)
    place = raw.FPDFText_GetCharIndexAtPos(page, min((left + right) / 2, left + near), (bottom + top) / 2, near, near)

    def is_own(at: int) -> bool:
        return at >= 0 and _OBJECT_OF_LETTER(address, at) == piece.object

    around = (place + step for step in _AROUND) if place >= 0 else ()
    first = last = next(filter(is_own, around), -1)
    if first < 0:
        return None
    while is_own(first - 1):
        first -= 1
    while last < first + _LONGEST and is_own(last + 1):
        last += 1
    visible = [at for at in range(first, last + 1) if chr(raw.FPDFText_GetUnicode(page, at)) not in _BLANK]
    return (visible[0], visible[-1]) if visible and last < first + _LONGEST else None


def _space(page: Any, place: int, step: int) -> str:
    """Return a space where the page paints one before or behind a letter. Those that PDFium adds do not count."""
    at = place + step
    while at >= 0 and (letter := chr(raw.FPDFText_GetUnicode(page, at))) in _BLANK and letter != "\0":
        if not raw.FPDFText_IsGenerated(page, at):
            return " "
        at += step
    return ""
