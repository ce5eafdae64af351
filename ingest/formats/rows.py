"""Rows of tables as lines, with what spans columns and rows repeated in each of them: `Site | Site | Chief`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

ROW_CHARACTERS = 1000
"""Most characters of a table row. A longer one is layout rather than a table, so each cell becomes its own blocks."""
LABEL_CHARACTERS = 200
"""Most characters of a cell that is repeated below. A longer one is layout, too."""
MOST_COLUMNS, MOST_ROWS = 100, 65_534
"""Most columns and rows that a cell spans; browsers allow 1000 columns."""


class TextBlock(NamedTuple):
    """A paragraph, heading, list item or table row.

    Attributes:
        mark: The kind: `## ` for a heading, `- ` or `5. ` for a list item, `| ` for a table row, or empty.
        text: The text without the mark.
        place: Where in the document the block is.
    """

    mark: str
    text: str
    place: str


class Cell:
    """A cell of a row.

    Attributes:
        columns: How many columns it is wide.
        rows: In how many rows it stands, where those below do not have a cell for it.
        like: The neighbour that it is a part of, where it does have a cell: `above`, `left`, or empty.
        blocks: What it holds.
    """

    __slots__ = ("blocks", "columns", "like", "rows")

    def __init__(self, columns: int = 1, rows: int = 1):
        self.columns, self.rows, self.like = columns, rows, ""
        self.blocks: deque[TextBlock] = deque()


class Table:
    """The cells of a table that later rows repeat."""

    def __init__(self) -> None:
        self._below: dict[int, tuple[int, str]] = {}
        self._above: list[str] = []
        self._columns, self._hidden = 0, set[int]()

    def add_columns(self, count: int, hidden: bool) -> None:
        """Say of the next columns whether they are hidden."""
        end = self._columns + min(count, MOST_COLUMNS)
        self._hidden.update(range(self._columns, end) if hidden else ())
        self._columns = end

    @property
    def hides_columns(self) -> bool:
        """Whether one of its columns is hidden."""
        return bool(self._hidden)

    def take_hidden(self, cells: list[Cell]) -> None:
        """Take the cells of hidden columns out of a row; where others span rows, they stay and are empty."""
        if not self._hidden:
            return
        at, kept = 0, list[Cell]()
        for cell in cells:
            while at in self._below:
                at += 1
            if self._hidden.issuperset(range(at, at + min(cell.columns, MOST_COLUMNS))):
                cell.blocks.clear()
            else:
                kept.append(cell)
            at += cell.columns
        if not self._below and all(cell.rows == 1 for cell in cells):
            cells[:] = kept

    def end_spans(self) -> None:
        """Let no cell reach into the rows that are yet to come."""
        self._below = {}

    def line(self, cells: list[Cell]) -> tuple[str, int]:
        """Return a row as a line, and how much of it is repeated. The line is empty where it is no row of a table."""
        filled = sum(1 for cell in cells if cell.blocks)
        short = not _is_long(cell.blocks for cell in cells)
        texts = [_text(cell.blocks) if short else "" for cell in cells]
        if not self._below and all(cell.columns == cell.rows == 1 and not cell.like for cell in cells):
            self._above = texts
            line = " | ".join(texts).rstrip(" |") if short and filled > 1 else ""
            return (line if len(line) <= ROW_CHARACTERS else ""), 0
        whole, first = self._placed(cells, texts)
        labels = any(text and first[at] is None for at, text in enumerate(whole))
        self._above = whole
        if not short or filled + labels < 2 or not filled:
            return "", len(whole) - len(cells)
        line = " | ".join(whole).rstrip(" |")
        if len(line) > ROW_CHARACTERS:
            line = " | ".join(text or "" for text in first).rstrip(" |")
        repeated = max(len(whole) - len(cells), sum(map(len, whole)) - sum(map(len, texts)))
        return (line if len(line) <= ROW_CHARACTERS else ""), repeated

    def _placed(self, cells: list[Cell], texts: list[str]) -> tuple[list[str], list[str | None]]:
        """Return the text of each column: as it is repeated, and only where it stands; None where a neighbour does."""
        whole, first, below = list[str](), list[str | None](), dict[int, tuple[int, str]]()
        for cell, text in zip(cells, texts, strict=True):
            self._repeat(whole, first, below)
            at = len(whole)
            shown = text
            if cell.like == "left" and not text:
                shown = whole[-1] if whole else ""
            elif cell.like == "above" and not text:
                shown = self._above[at] if at < len(self._above) else ""
            label = shown if len(shown) <= LABEL_CHARACTERS else ""
            more = min(cell.columns, MOST_COLUMNS) - 1
            whole += [shown, *[label] * more]
            first += [text if text or not cell.like else None, *[""] * more]
            if cell.rows > 1:
                below.update(dict.fromkeys(range(at, at + more + 1), (min(cell.rows, MOST_ROWS) - 1, label)))
        while len(whole) in self._below:
            self._repeat(whole, first, below)
        self._below = below
        return whole, first

    def _repeat(self, whole: list[str], first: list[str | None], below: dict[int, tuple[int, str]]) -> None:
        """Add the cells of rows above that stand at the next columns."""
        while (above := self._below.get(len(whole))) is not None:
            rows, label = above
            if rows > 1:
                below[len(whole)] = (rows - 1, label)
            whole.append(label)
            first.append(None)


def _text(blocks: deque[TextBlock]) -> str:
    """Return a cell in one line. Its list items keep their numbers."""
    if len(blocks) == 1 and not blocks[0].mark:
        return " ".join(blocks[0].text.split())
    return " ".join(
        (block.mark.lstrip(" #") if block.mark.strip(" -|#") else "") + " ".join(block.text.split()) for block in blocks
    )


def _is_long(cells: Iterable[Iterable[TextBlock]]) -> bool:
    """Whether cells hold far more than a row may. No more of them is read than says so."""
    length = 0
    for cell in cells:
        for block in cell:
            length += len(block.text)
            if length > 8 * ROW_CHARACTERS:  # white space is yet to be joined
                return True
    return False
