"""The pieces in which a page of a PDF paints its text: how large they are, and where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_float
from itertools import pairwise
from typing import Any, NamedTuple

from pypdfium2 import PdfPage
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
    FPDFTextObj_GetFontSize,
)

LOWERED, NEAR = 0.06, 0.5
"""Least shift of a piece below its line, and most distance from the one before, as shares of the size of its line."""
FEW = 32
"""Pieces of a page up to which all of them are looked at."""
LONGEST = 16
"""Letters of a piece that is off the line."""
_UNIT = 1.5
"""Size of a font up to which it says nothing, for the page scales it."""
_DEEPEST = 8
"""Forms inside each other that are looked into."""

_Matrix = tuple[float, float, float, float, float, float]
_WHOLE: _Matrix = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


class PaintedPiece(NamedTuple):
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

    @property
    def is_blank(self) -> bool:
        """Whether it paints nothing, as a space alone."""
        left, _, right, _ = self.box()
        return right <= left


class PaintedPieces:
    """The text of a page in the order in which it is painted.

    Attributes:
        changes: Numbers of the pieces whose size differs from that of a neighbour; all of them where they are few.
    """

    def __init__(self, page: PdfPage):
        self._objects: list[tuple[Any, _Matrix]] = []
        self._sizes: list[float] = []
        self._known: dict[int, PaintedPiece] = {}
        self._collect(page.raw, FPDFPage_CountObjects(page), FPDFPage_GetObject, _WHOLE, 0)
        is_mixed = len({*self._sizes}) > 1 or min(self._sizes, default=2) <= _UNIT
        self.changes: Sequence[int] = (
            range(len(self)) if 1 < len(self) <= FEW else sorted(self._changes() if is_mixed else ())
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, number: int) -> PaintedPiece:
        """Return a piece. Most are never asked for."""
        if number not in self._known:
            painted, around = self._objects[number]
            a, b, _, d, e, f = _matrix(painted, around)
            is_upright = a > 0 and d > 0 and abs(b) < 0.01 * a  # text that is turned is left as it is
            self._known[number] = PaintedPiece(painted, around, self._sizes[number] * d if is_upright else 0.0, e, f)
        return self._known[number]

    def alike(self, at: int) -> Iterator[int]:
        """Yield the pieces behind one that stand beside it on its line in its size, as far as a script reaches."""
        for number in range(at + 1, min(at + LONGEST, len(self))):
            piece, before = self[number], self[number - 1]
            near = piece.size == before.size and abs(piece.line - before.line) < LOWERED * before.size
            if not near or abs(piece.left - before.box()[2]) >= NEAR * before.size:
                return
            yield number

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
