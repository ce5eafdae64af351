"""Two columns of a page that are painted line by line across both: each is read from top to bottom.

    The harbour of Tarn was     The crane was bought by
    built by Ada Brook in       the town for 90 crowns.
    the year of the flood.

The rows of a table are painted likewise. Columns are told from them by their lines, which are long, and of which most
begin in lower case. Simple programs paint so, in few pieces; pages of many pieces are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pypdfium2 import PdfTextPage

from ragkv.ingest.formats.pdf_pieces import PaintedPiece, PaintedPieces

_LEAST, _MOST = 3, 240
"""Lines of two columns, and most pieces of a page that is looked at."""
_LONG = 18
"""Characters that lines of a column have in the mean."""
_WIDE = 8
"""Width of a column, as a share of the size of its letters."""
_SAME = 2.0
"""Points by which lines of a column begin apart."""
_PITCH = 2.0
"""Distance of two lines up to which they belong together, as a share of their size."""
_Row = tuple[PaintedPiece, PaintedPiece]


def by_columns(text: str, painted: PdfTextPage, pieces: PaintedPieces) -> str:
    """Return the text of a page with its columns one below the other."""
    if not 2 * _LEAST <= len(pieces) <= _MOST:
        return text
    at = len(pieces) // 2 - 1
    if not any(_is_apart(pieces[at + step], pieces[at + step + 1]) for step in (0, 1)):
        return text
    for rows in _blocks(pieces):
        columns = _columns(painted, rows)
        if len({*map(len, columns)}) > 1 or not all(map(_is_long, columns)) or not _go_on(columns):
            continue
        before = "\r\n".join(" ".join(f"{left} {right}".split()) for left, right in zip(*columns, strict=True))
        if text.count(before) == 1:
            text = text.replace(before, "\r\n".join(line for column in columns for line in column))
    return text


def _columns(painted: PdfTextPage, rows: Sequence[_Row]) -> list[list[str]]:
    """Return the lines of both columns."""
    size, edge = rows[0][0].size, min(right.left for _, right in rows)
    low, high = rows[-1][0].line - size / 3, rows[0][0].line + size
    left, end = min(left.left for left, _ in rows), max(right.box()[2] for _, right in rows)
    sides = ((left - 1, edge - 1), (edge - 1, end + 1))
    texts = (str(painted.get_text_bounded(first, low, last, high)) for first, last in sides)
    return [[line.strip() for line in text.strip().split("\r\n")] for text in texts]


def _blocks(pieces: PaintedPieces) -> Iterator[list[_Row]]:
    """Yield rows of two pieces each that stand below each other."""
    rows, at = list[_Row](), 0
    while at + 1 < len(pieces):
        row = pieces[at], pieces[at + 1]
        if not _is_apart(*row):
            at += 1
            continue
        if rows and not _is_below(rows[-1], row):
            if len(rows) >= _LEAST:
                yield rows
            rows = []
        rows.append(row)
        at += 2
    if len(rows) >= _LEAST:
        yield rows


def _is_apart(left: PaintedPiece, right: PaintedPiece) -> bool:
    """Whether two pieces stand on one line, as lines of two columns do."""
    return left.line == right.line and left.size == right.size > 0 and right.left - left.left > _WIDE * left.size


def _is_below(above: _Row, below: _Row) -> bool:
    starts_alike = all(abs(upper.left - lower.left) < _SAME for upper, lower in zip(above, below, strict=True))
    return starts_alike and 0 < above[0].line - below[0].line < _PITCH * below[0].size


def _is_long(lines: Sequence[str]) -> bool:
    return sum(map(len, lines)) >= _LONG * len(lines)


def _go_on(columns: Sequence[Sequence[str]]) -> bool:
    """Whether most lines below the first ones begin in lower case."""
    starts = [line[:1].islower() for column in columns for line in column[1:]]
    return 2 * sum(starts) > len(starts)
