"""What the formats share: what a parser hands out, and blocks of text that it is put together from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ragkv.errors import TooLarge

LINE = "\u2028"
"""Ends a line inside a block."""
MAX_TITLE = 300
"""Characters of a title."""
ROW_CHARACTERS = 1000
"""A longer table row is no row of figures but laid out text: its cells become blocks of their own."""

# What some files hold between their letters and no text can: control characters and halves of surrogate pairs.
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1f\x7f\ud800-\udfff]")


class Parsed(NamedTuple):
    """A document as its file tells it. title: one line, empty where the file names none. metadata: JSON."""

    title: str
    text: str
    metadata: Mapping[str, Any]


Parser = Callable[[bytes, int], Parsed]
"""(bytes of a file, bytes its text may have) → Parsed. Raises InvalidDocument, TooLarge, without the file's name."""


def one_line(text: str) -> str:
    """For titles: white space is single spaces, and what is too long ends at MAX_TITLE."""
    return " ".join(_NO_TEXT.sub("", text[: 8 * MAX_TITLE]).split())[:MAX_TITLE].rstrip()


def without_controls(text: str) -> str:
    return _NO_TEXT.sub("", text)


class TextRoom:
    """How much text there may still be. limit: bytes; characters are counted on the way, bytes when all is there."""

    def __init__(self, limit: int):
        self._limit = self._left = limit

    def take(self, text: str) -> str:
        """The text, when it fits. Raises TooLarge."""
        self._left -= len(text)
        if self._left < 0:
            raise TooLarge(f"its text has over {self._limit} bytes (max_document_bytes)")
        return text


class TextBlock(NamedTuple):
    """mark: what tells its kind, `## ` of a heading, `- ` of a list item, `| ` of a table row, or none."""

    mark: str
    text: str
    place: str


class TextBlocks:
    """Puts the text of a marked-up document together, in the order in which a parser meets it.

    Paragraphs are parted by an empty line; items of a list, and rows of a table, follow one another line by line.
    Cells of a row are parted by ` | `.
    """

    def __init__(self, limit: int):
        self.place = ""
        """Where in the document the parser is; `joined` can leave places out."""
        self._room = TextRoom(limit)
        self._parts: list[str] = []
        self._mark = ""
        self._blocks: list[TextBlock] = []
        self._rows: list[list[list[TextBlock]]] = []

    def write(self, text: str) -> None:
        """Text of the block that is open. Raises TooLarge."""
        self._parts.append(self._room.take(text))

    def mark(self, mark: str) -> None:
        """What the next block begins with."""
        self._mark = mark

    def pause(self, verbatim: bool = False) -> None:
        """The block ends here. verbatim: its white space stays as it is, else it is single spaces."""
        whole = "".join(self._parts)
        self._parts.clear()
        if verbatim:
            text = "\n".join(line.rstrip() for line in whole.replace(LINE, "\n").split("\n")).strip("\n")
        else:
            text = "\n".join(" ".join(line.split()) for line in whole.split(LINE)).strip("\n")
        if not text.strip():
            return
        self._add(TextBlock(self._mark, text, self.place))
        self._mark = ""

    def open_row(self) -> None:
        self.pause()
        self._rows.append([])

    def open_cell(self) -> None:
        self.pause()
        if self._rows:
            self._rows[-1].append([])

    def close_row(self) -> None:
        self.pause()
        if not self._rows:
            return
        cells = self._rows.pop()
        filled = sum(1 for cell in cells if cell)
        row = " | ".join(" ".join(" ".join(block.text.split()) for block in cell) for cell in cells).rstrip(" |")
        if filled > 1 and len(row) <= ROW_CHARACTERS:
            self._add(TextBlock("| ", row, self.place))
            return
        for cell in cells:
            for block in cell:
                self._add(block)

    def heading(self) -> str:
        """The first one, else nothing."""
        return next((block.text for block in self._blocks if block.mark.startswith("#")), "")

    def length(self, place: str) -> int:
        """Characters of one place."""
        return sum(len(block.text) for block in self._blocks if block.place == place)

    def joined(self, *without: str) -> str:
        """The text of all places, but for those."""
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

    def _add(self, block: TextBlock) -> None:
        if not self._rows:
            self._blocks.append(block)
            return
        row = self._rows[-1]
        if not row:
            row.append([])
        row[-1].append(block)
