"""What the formats share: the result of a parser, and the blocks of text that it is put together from."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ragkv.errors import TooLarge

LINE = "\u2028"
"""Separates lines inside a block."""
MAX_TITLE = 300
"""Most characters of a title."""
ROW_CHARACTERS = 1000
"""Most characters of a table row. A longer one is layout rather than a table, so each cell becomes its own blocks."""

# Characters that occur in files but cannot be in text: control characters and halves of surrogate pairs.
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


class TextBlock(NamedTuple):
    """A paragraph, heading, list item or table row.

    Attributes:
        mark: The kind: `## ` for a heading, `- ` for a list item, `| ` for a table row, or empty.
        text: The text without the mark.
        place: Where in the document the block is.
    """

    mark: str
    text: str
    place: str


class TextBlocks:
    """Collects the text of a marked-up document in the order in which a parser meets it.

    Paragraphs are separated by an empty line. Items of a list and rows of a table follow one another line by line, and
    the cells of a row are separated by ` | `.
    """

    def __init__(self, limit: int):
        self.place = ""
        """Where in the document the parser is. `joined` can leave places out."""
        self._room = TextRoom(limit)
        self._parts: list[str] = []
        self._mark = ""
        self._blocks: list[TextBlock] = []
        self._rows: list[list[deque[TextBlock]]] = []

    def write(self, text: str) -> None:
        """Add text to the open block. Raises TooLarge."""
        self._parts.append(self._room.take(text))

    def mark(self, mark: str) -> None:
        """Set the mark of the next block."""
        self._mark = mark

    def pause(self, verbatim: bool = False) -> None:
        """End the open block. Its white space becomes single spaces, unless `verbatim` keeps it."""
        whole = "".join(self._parts)
        self._parts.clear()
        if verbatim:
            text = "\n".join(line.rstrip() for line in whole.replace(LINE, "\n").split("\n")).strip("\n")
        else:
            text = "\n".join(" ".join(line.split()) for line in whole.split(LINE)).strip("\n")
        if not text.strip():
            return
        self._add(deque([TextBlock(self._mark, text, self.place)]))
        self._mark = ""

    def open_row(self) -> None:
        """Begin a table row."""
        self.pause()
        self._rows.append([])

    def open_cell(self) -> None:
        """Begin a cell of the open row."""
        self.pause()
        if self._rows:
            self._rows[-1].append(deque())

    def close_row(self) -> None:
        """End the open row."""
        self.pause()
        if not self._rows:
            return
        cells = self._rows.pop()
        if sum(1 for cell in cells if cell) > 1 and not _is_long(cells):
            row = " | ".join(" ".join(" ".join(block.text.split()) for block in cell) for cell in cells).rstrip(" |")
            if len(row) <= ROW_CHARACTERS:
                self._add(deque([TextBlock("| ", row, self.place)]))
                return
        for cell in cells:
            self._add(cell)

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
                text.append("\n" if block.mark == before and before in ("- ", "| ") else "\n\n")
            text.append(block.text if block.mark == "| " else block.mark + block.text)
            before = block.mark
        return "".join(text)

    def _add(self, blocks: deque[TextBlock]) -> None:
        """Add blocks to the open cell, or else to the text. The fewer ones are moved, for cells may nest deeply."""
        if not self._rows:
            self._blocks.extend(blocks)
            return
        row = self._rows[-1]
        if not row:
            row.append(deque())
        if len(blocks) > len(row[-1]):
            blocks.extendleft(reversed(row[-1]))
            row[-1] = blocks
        else:
            row[-1].extend(blocks)


def _is_long(cells: Iterable[Iterable[TextBlock]]) -> bool:
    """Whether cells hold far more than a row may. No more of them is read than says so."""
    length = 0
    for cell in cells:
        for block in cell:
            length += len(block.text)
            if length > 8 * ROW_CHARACTERS:  # white space is yet to be joined
                return True
    return False
