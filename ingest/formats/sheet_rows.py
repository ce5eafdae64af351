"""The rows of a spreadsheet, and the tables that stand beside each other in them.

    Name   Town     (empty)   Machine   Place
    Vala   Orrin              Crane     Harbour
    Timo   Lume

An empty column between two parts may as well be there for the eye, in one table. So parts are tables of their own only
where more says so: names that occur in both, a title above each, another first row, or rows that only one of them has.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

AHEAD = 12
"""Rows that are looked at to find the names of columns, and tables beside each other."""
YEAR = re.compile(r"(?:19|20)\d\d")
"""A number that names a column as well as any word does."""
_VALUE = re.compile(r"[+-]?[$€£¥]?\s?[\d.,][\d.,:/\s%-]*+(?:[^\W\d_]{1,4}|[$€£¥])?\.?")


class SheetRow(NamedTuple):
    """A row that is not empty.

    Attributes:
        cells: Its texts by column, from 0 on, without empty ones.
        is_apart: Whether empty rows stand above it.
        repeated: Columns that repeat the cell on their left, of which they are a part.
        style: Number of the style of its last cell; -1 where rows have no styles.
    """

    cells: dict[int, str]
    is_apart: bool = False
    repeated: frozenset[int] = frozenset()
    style: int = -1

    @property
    def is_single(self) -> bool:
        """Whether it has one text, which may span several columns."""
        return len(self.cells) - len(self.repeated) == 1

    @property
    def is_text(self) -> bool:
        """Whether none of its cells is a number or a date."""
        return not any(map(is_value, self.cells.values()))

    def is_styled_like(self, others: Iterable[SheetRow]) -> bool:
        """Whether one of these rows has the same style; rows without styles have."""
        return any(other.style == self.style for other in others)

    def part(self, first: int, end: int, is_apart: bool) -> SheetRow:
        """Return the cells from a column on, and before another one."""
        cells = {at: cell for at, cell in self.cells.items() if first <= at < end}
        return SheetRow(cells, is_apart, self.repeated & cells.keys(), self.style)


class TablesBeside:
    """Takes the tables on the right out of rows.

    Attributes:
        right: Their rows.
    """

    def __init__(self) -> None:
        self.right: list[SheetRow] = []
        self._edge: int | None = None
        self._widest = -1
        self._is_gap = [False, False]

    def left(self, rows: Iterator[SheetRow]) -> Iterator[SheetRow]:
        """Yield the rows without the tables on the right."""
        ahead, is_first = deque[SheetRow](), True
        while (row := ahead.popleft() if ahead else next(rows, None)) is not None:
            last = next(reversed(row.cells))
            if is_first or row.is_apart or (last > self._widest + 2 and self._edge is None and len(row.cells) > 1):
                ahead.extend(islice(rows, AHEAD - 1 - len(ahead)))
                self._find(list(_block([row, *ahead])), is_first or row.is_apart)
                is_first = False
            if last > self._widest:
                self._widest = last
            if self._edge is None:
                yield row
            else:
                yield from self._parts(row, self._edge)

    def _find(self, block: Sequence[SheetRow], is_new: bool) -> None:
        """Find the column in which a table on the right begins, in the rows up to the next empty one."""
        if is_new:
            if self._edge is not None and all(self._edge - 1 not in row.cells for row in block):
                return
            self._edge, self._widest, self._is_gap = None, -1, [False, False]
        columns = sorted({at for row in block for at in row.cells.keys() - row.repeated} | {self._widest})
        for before, at in pairwise(columns):
            if at > before + 1 and before >= (0 if is_new else self._widest) and _is_apart(block, at, is_new):
                self._edge = at
                return

    def _parts(self, row: SheetRow, edge: int) -> Iterator[SheetRow]:
        """Yield what a row has of the table on the left, and keep the rest."""
        parts = row.part(0, edge, row.is_apart or self._is_gap[0]), row.part(edge, 1 << 20, self._is_gap[1])
        shown = [len(part.cells) > len(part.repeated) for part in parts]
        if shown[1]:
            self.right.append(parts[1])
        self._is_gap = [not shown[0], (not shown[1] or row.is_apart) and bool(self.right)]
        if shown[0]:
            yield parts[0]


def _block(rows: Iterable[SheetRow]) -> Iterator[SheetRow]:
    """Yield the first row, and those that follow without an empty one between."""
    first, *others = rows
    yield first
    yield from takewhile(lambda row: not row.is_apart, others)


def _is_apart(block: Sequence[SheetRow], edge: int, is_new: bool) -> bool:
    """Whether the columns from `edge` on are a table of their own.

    is_new: Whether the table on the left begins in these rows, too.
    """
    parts = [(row.part(0, edge, False), row.part(edge, 1 << 20, False)) for row in block]
    names = [next((at for at, part in enumerate(side) if len(part.cells) > 1), -1) for side in zip(*parts, strict=True)]
    left, right = names
    if is_new and left >= 0 and right >= 0 and _are_sums([part for _, part in parts]):
        return True
    if right < 0 or not parts[right][1].is_text or (is_new and left < 0):
        return False
    below = [part for _, part in parts[right + 1 :]]
    if not below or len(below[0].cells) < 2 or not all(edge in part.cells for part in below if part.cells):
        return False
    if not is_new or (left != right and not any(part.cells for _, part in parts[:right])):
        return _has_keys(below, edge)
    own, other = (list(part.cells.values()) for part in parts[right])
    if own and own[0] == other[0]:
        return True
    if other[0] in own or not _has_keys(below, edge):  # more columns of one table, of the next week or year
        return False
    ends = [max(at for at, part in enumerate(side) if part.cells) for side in zip(*parts, strict=True)]
    return bool({*own} & {*other}) or _has_titles(parts[:right], edge) or ends[0] != ends[1]


def _are_sums(rows: Sequence[SheetRow]) -> bool:
    """Whether rows beside a table have a label and a number each, from the row of its names on: `Total   11`."""
    filled = [list(row.cells.values()) for row in rows if row.cells]
    return (
        len(filled[0]) == 2
        and not YEAR.fullmatch(filled[0][1])
        and all(len(cells) == 2 and not is_value(cells[0]) and is_value(cells[1]) for cells in filled)
    )


def _has_keys(rows: Sequence[SheetRow], column: int) -> bool:
    """Whether the first column of a table names its rows."""
    return not any(is_value(row.cells[column]) for row in rows if row.cells)


def _has_titles(rows: Sequence[tuple[SheetRow, SheetRow]], edge: int) -> bool:
    """Whether a row above the names has a title for each of two tables."""
    return any(left.is_single and right.is_single and edge in right.cells for left, right in rows)


def is_value(cell: str) -> bool:
    """Whether a cell is a number or a date."""
    return _VALUE.fullmatch(cell) is not None


def filled(cells: Iterable[str]) -> dict[int, str]:
    """Return the cells that are not empty, by column."""
    return {at: cell for at, cell in enumerate(cells) if cell}
