"""What the formats share: the result of a parser, and the blocks of text that it is put together from."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from ragkv.errors import TooLarge
from ragkv.ingest.formats.rows import Cell, Table, TextBlock
from ragkv.ingest.formats.scripts import resolved

LINE = "\u2028"
"""Separates lines inside a block."""
MAX_TITLE = 300
"""Most characters of a title."""

# Characters that occur in files but cannot be in text: control characters and halves of surrogate pairs.
_MARKED = re.compile(r"^ {0,3}(?:#{1,6}[ \t]|```|~~~)", re.MULTILINE)
"""A line of text that would be taken for a heading, or for the beginning of code."""
_FRACTION = re.compile(r"(?:\n|\A)([^\n]{1,20})\n(/)\n([^\n]{1,20})(?:\n|\Z)")
"""A fraction whose parts are lines of their own."""
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1f\x7f\ud800-\udfff]")


class Parsed(NamedTuple):
    """The content of a file.

    Attributes:
        title: One line; empty where the file has no title.
        text: The text.
        metadata: JSON values.
        pages: (offset, number) of each page that was read, as in `Document.pages`; empty for formats without pages.
    """

    title: str
    text: str
    metadata: Mapping[str, Any]
    pages: tuple[tuple[int, int], ...] = ()


Parser = Callable[[bytes, int], Parsed]
"""(bytes of a file, most bytes of its text) → Parsed. Raises InvalidDocument and TooLarge without the file's name."""


def one_line(text: str) -> str:
    """Make a title: white space becomes single spaces, and a long text is cut at MAX_TITLE."""
    return " ".join(_NO_TEXT.sub("", text[: 8 * MAX_TITLE]).split())[:MAX_TITLE].rstrip()


def without_controls(text: str) -> str:
    """Remove the characters that cannot be in text."""
    return _NO_TEXT.sub("", text)


def without_headings(text: str) -> str:
    """Indent the lines that look like headings, or like the beginning of code, and are none."""
    if "#" not in text and "```" not in text and "~~~" not in text:
        return text
    return _MARKED.sub(lambda line: f"    {line[0]}", text) if _MARKED.search(text) else text


class TextRoom:
    """Counts how much text there may still be.

    The limit is in bytes. Only characters are counted here; the bytes are counted once the text is complete.
    """

    def __init__(self, limit: int):
        self._limit = self._left = limit

    def take(self, text: str) -> str:
        """Return the text if it still fits. Raises TooLarge."""
        self._left -= len(text)
        if self._left < 0:
            raise TooLarge(f"its text has over {self._limit} bytes (max_document_bytes)")
        return text


class TextBlocks:
    """Collects the text of a marked-up document in the order in which a parser meets it.

    Paragraphs are separated by an empty line. Items of a list and rows of a table follow one another line by line, and
    the cells of a row are separated by ` | `. Lines that look like headings and are none are indented as code is.
    """

    def __init__(self, limit: int):
        self.place = ""
        """Where in the document the parser is. `joined` can leave places out."""
        self._room = TextRoom(limit)
        self._parts: list[str] = []
        self._aside: list[tuple[str, list[str]]] = []
        self._mark = self._formula = ""
        self._blocks: list[TextBlock] = []
        self._rows: list[list[Cell]] = []
        self._tables: list[Table] = []

    def write(self, text: str) -> None:
        """Add text to the open block. Raises TooLarge."""
        self._parts.append(self._room.take(text))

    def write_formula(self, formula: str) -> None:
        """Add a formula, apart from a number, `1 1/2`, and from a formula before it."""
        last = next((part for part in reversed(self._parts) if part), "")[-1:]
        apart = (last.isdigit() and formula[:1].isdigit()) or (last and self._parts[-1] is self._formula)
        self._formula = f" {formula}" if apart else formula
        self.write(self._formula)

    def begin_line(self) -> None:
        """Begin a line in the open block, unless it is at the start of one."""
        before = next((part for part in islice(reversed(self._parts), 8) if part == LINE or not part.isspace()), "")
        if before and not before.endswith(LINE):
            self._parts.append(LINE)

    def mark(self, mark: str) -> None:
        """Set the mark of the next block."""
        self._mark = mark

    def pause(self, verbatim: bool = False) -> None:
        """End the open block. Its white space becomes single spaces, unless `verbatim` keeps it."""
        if not self._parts:
            return
        whole = "".join(self._parts)
        self._parts.clear()
        if not verbatim and (LINE not in whole or self._mark.startswith("#")):  # a heading is one line
            text = " ".join(whole.split())
        elif verbatim:
            text = "\n".join(line.rstrip() for line in whole.replace(LINE, "\n").split("\n")).strip("\n")
        else:
            text = "\n".join(" ".join(line.split()) for line in whole.split(LINE)).strip("\n")
            text = _FRACTION.sub(r" \1\2\3 ", text).strip(" ") if "\n/\n" in text else text
        text = resolved(text)
        if not text or text.isspace():
            return
        self._add(deque([TextBlock(self._mark, text, self.place)]))
        self._mark = ""

    def keep_number(self) -> None:
        """Let the number of an item without text be the text of its cell."""
        if self._rows and not any(self._parts) and (number := self._mark.strip(" -#|")):
            self._parts, self._mark = [number], ""

    def set_aside(self) -> None:
        """Put the open block aside for those of a box in it, which come before it."""
        self._aside.append((self._mark, self._parts))
        self._mark, self._parts = "", []

    def resume(self) -> None:
        """Go on with the block that was put aside."""
        self.pause()
        self._mark, self._parts = self._aside.pop()

    def open_table(self) -> None:
        """Begin a table."""
        self.pause()
        self._tables.append(Table())

    def close_table(self) -> None:
        """End the open table."""
        self.pause()
        if self._tables:
            self._tables.pop()

    def add_columns(self, count: int, hidden: bool) -> None:
        """Say of the next columns of the open table whether they are hidden."""
        if self._tables:
            self._tables[-1].add_columns(count, hidden)

    def open_section(self) -> None:
        """Begin a part of the open table, into which no cell above it reaches."""
        self.pause()
        if self._tables:
            self._tables[-1].end_spans()

    def open_row(self) -> None:
        """Begin a table row."""
        self.pause()
        self._rows.append([])

    def open_cell(self, columns: int = 1, rows: int = 1) -> None:
        """Begin a cell of the open row, which spans so many columns and rows."""
        self.pause()
        if self._rows:
            self._rows[-1].append(Cell(columns, rows))

    def skip_cell(self, columns: int) -> None:
        """Leave out a cell that is hidden; where its table has hidden columns, it stands in one of them."""
        if self._tables and self._tables[-1].hides_columns:
            self.open_cell(columns)

    def widen_cell(self, columns: int = 1, like: str = "") -> None:
        """Let the open cell span columns, or be a part of the one `above` or `left`."""
        if self._rows and self._rows[-1]:
            cell = self._rows[-1][-1]
            cell.columns, cell.like = max(cell.columns, columns), cell.like or like

    def close_row(self) -> None:
        """End the open row."""
        self.pause()
        if not self._rows:
            return
        cells, table = self._rows.pop(), self._tables[-1] if self._tables else Table()
        table.take_hidden(cells)
        line, repeated = table.line(cells)
        self._room.take(" " * repeated)
        if line:
            self._add(deque([TextBlock("| ", line, self.place)]))
            return
        for cell in cells:
            self._add(cell.blocks)

    def heading(self) -> str:
        """Return the text of the first heading; empty when there is none."""
        return next((block.text for block in self._blocks if block.mark.startswith("#")), "")

    def length(self, place: str) -> int:
        """Count the characters of one place."""
        return sum(len(block.text) for block in self._blocks if block.place == place)

    def joined(self, *without: str) -> str:
        """Return the text of all places except these."""
        text: list[str] = []
        before = ""
        for block in self._blocks:
            if block.place in without:
                continue
            if text:
                text.append("\n" if before and _kind(block.mark) == before != "#" else "\n\n")
            text.append(_written(block))
            before = _kind(block.mark)
        return "".join(text)

    def _add(self, blocks: deque[TextBlock]) -> None:
        """Add blocks to the open cell, or else to the text. The fewer ones are moved, for cells may nest deeply."""
        if not self._rows:
            self._blocks.extend(blocks)
            return
        row = self._rows[-1]
        if not row:
            row.append(Cell())
        cell = row[-1]
        if len(blocks) > len(cell.blocks):
            blocks.extendleft(reversed(cell.blocks))
            cell.blocks = blocks
        else:
            cell.blocks.extend(blocks)


def _kind(mark: str) -> str:
    """Return `#` for the mark of a heading, `|` for that of a row, `-` for that of a list item, or an empty text."""
    return mark[:1] if mark[:1] in ("#", "|") else mark and "-"


def _written(block: TextBlock) -> str:
    """Return a block with its mark. What is no heading does not look like one."""
    if block.mark.startswith("#"):
        return block.mark + block.text
    text = block.text if block.mark == "| " else block.mark + block.text
    if "#" not in text and "```" not in text and "~~~" not in text:
        return text
    return "\n".join(f"    {line}" for line in text.split("\n")) if _MARKED.search(text) else text
