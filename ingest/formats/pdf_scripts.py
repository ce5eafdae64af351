"""Text above and below the line of a page: `10^6`, `H2O`, `x_i`, `the 1st`, `1987 [3]`.

A page paints its text in pieces, each with a size and a place. A piece is above or below the line where it is smaller
than the one before it, shifted, and close to it. Pieces are fewer than letters; to look at them takes 4 to 49% of the
time of a document without it, more where many are off the line (docs/lab-notes.md).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from ctypes import addressof, c_ushort
from itertools import compress
from typing import Any, NamedTuple

from pypdfium2 import PdfPage, PdfTextPage
from pypdfium2.raw import (
    FPDFText_CountChars,
    FPDFText_GetBoundedText,
    FPDFText_GetCharIndexAtPos,
    FPDFText_GetTextIndexFromCharIndex,
    FPDFText_GetTextObject,
    FPDFText_GetUnicode,
    FPDFText_IsGenerated,
)

from ragkv.ingest.formats.pdf_columns import by_columns
from ragkv.ingest.formats.pdf_pieces import LONGEST, LOWERED, NEAR, PaintedPiece, PaintedPieces
from ragkv.ingest.formats.scripts import END, SUB, SUP, resolved

_SMALLER, _SMALLEST = 0.92, 0.45
"""Size of a piece as a share of the size of its line. A letter that begins a chapter is larger than that."""
_RAISED, _MOVED, _HALF = 0.15, 0.25, 0.5
"""Least shift of a piece up, of one in the size of its line, and most shift down, likewise."""
_SPACE, _FAR = 0.15, 1.5
"""Distance of two pieces from which on a space is between them, and from which on they have nothing to do with each
other, likewise."""
_AROUND = (0, -1, 1, -2, 2)
"""Letters around a place, for boxes of letters overlap."""
_FEW = 4
"""Lines up to which a letter in each says nothing."""
_BLANK = " \t\r\n\xa0\x02\ufffe\0"
_TO_NOTHING = dict.fromkeys(map(ord, _BLANK), "\0")
_VISIBLE = re.compile(f"[^{_BLANK}]")


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
    painted, text = _painted(page)
    pieces = PaintedPieces(page)
    found = dict(_off_line(pieces))
    if not found:
        return by_columns(text, painted, pieces)
    letters: str = painted.get_text_range()
    if not letters.isascii() and len(letters.encode("utf-16-le", errors="replace")) != 2 * len(letters):
        return text  # places of letters are those of UTF-16
    return _written(text, letters, sorted(_scripts(painted.raw, pieces, found)))


def _painted(page: PdfPage) -> tuple[PdfTextPage, str]:
    """Open and return the text of a page, letters that are painted one by one in lines from left to right.

    PDFium takes them for columns where few lines, or the cells of a table, leave more free beside them than above. It
    looks only at what is inside the page, so that of a page without height it takes all to be lines. A page whose lines
    then have a letter each is opened again as it is.
    """
    left, bottom, right, top = page.get_bbox()
    page.set_cropbox(left, bottom, right, bottom + min(1, top - bottom))
    painted = page.get_textpage()
    page.set_cropbox(left, bottom, right, top)
    text = _text(painted)
    letters = sum(len(line) < 2 for line in text.split("\r\n"))
    if letters > _FEW and 2 * letters > text.count("\r\n") + 1:
        painted = page.get_textpage()
        text = _text(painted)
    return painted, text


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


def _off_line(pieces: PaintedPieces) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield each piece that is off the line: (its number, (number of the piece on its line, mark))."""
    scripts = dict[int, int]()
    for at in pieces.changes:
        base, mark = scripts.get(at - 1, at - 1), ""
        if base >= 0 and (mark := _mark(pieces[base], pieces[at])) and not _is_near(pieces, base, at):
            mark = ""
        is_first = not mark and at + 1 < len(pieces) and pieces[at].size < pieces[at + 1].size
        if is_first and _mark(pieces[at + 1], pieces[at]) == SUP:  # of a note before its text
            base, mark = at + 1, SUP if _is_near(pieces, at, at + 1) else ""
        if mark:
            scripts[at] = base
            yield at, (base, mark)
            for more in pieces.alike(at):  # letters that are painted one by one
                scripts[more] = base
                yield more, (base, mark)


def _mark(base: PaintedPiece, piece: PaintedPiece) -> str:
    """Return the mark of a piece that is off the line of a base; empty for one that is on it."""
    shift = (piece.line - base.line) / base.size if base.size else 0.0
    if piece.size == base.size:
        return (SUP if shift > 0 else SUB) if _MOVED < abs(shift) < _HALF else ""
    if not _SMALLEST * base.size < piece.size < _SMALLER * base.size:
        return ""
    if _RAISED < shift < 1:
        return SUP
    return SUB if -_HALF < shift < -LOWERED else ""


def _is_near(pieces: PaintedPieces, base: int, at: int) -> bool:
    """Whether a piece stands behind a base, or behind what is off the line of that base."""
    piece, most = pieces[at], NEAR * max(pieces[base].size, pieces[at].size)
    return any(abs(piece.left - pieces[before].box()[2]) < most for before in {base, at - 1})


def _scripts(page: Any, pieces: PaintedPieces, found: dict[int, tuple[int, str]]) -> Iterator[_Script]:
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
                between = _space(page, span[1], 1) or (" " if gap > _SPACE or pieces[at + 1].is_blank else "")
        yield _Script(start, last + 1, mark, before, between)


def _is_level(base: PaintedPiece, piece: PaintedPiece) -> bool:
    """Whether a piece stands on the line of a base."""
    return abs(piece.line - base.line) < LOWERED * base.size


def _span(page: Any, piece: PaintedPiece) -> tuple[int, int] | None:
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
    while last < first + LONGEST and is_own(last + 1):
        last += 1
    visible = [at for at in range(first, last + 1) if chr(FPDFText_GetUnicode(page, at)) not in _BLANK]
    return (visible[0], visible[-1]) if visible and last < first + LONGEST else None


def _space(page: Any, place: int, step: int) -> str:
    """Return a space where the page paints one before or behind a letter. Those that PDFium adds do not count."""
    at = place + step
    while at >= 0 and (letter := chr(FPDFText_GetUnicode(page, at))) in _BLANK and letter != "\0":
        if not FPDFText_IsGenerated(page, at):
            return " "
        at += step
    return ""
