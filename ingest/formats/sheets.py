"""The sheets of a workbook: their rows as a reader sees them, with what is shared between them: texts and styles.

Hidden rows and columns, and those without height or width, are left out. A merged cell is repeated in the rows and
columns that it covers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime

from ragkv.ingest.formats.cell_styles import CellStyle, RichText, Strings, unescaped, whole
from ragkv.ingest.formats.package import PartHandler
from ragkv.ingest.formats.shared_formulas import SharedFormulas
from ragkv.ingest.formats.sheet_rows import SheetRow
from ragkv.ingest.formats.symbols import signs

MOST_COLUMNS = 16_384
MOST_REPEATED = 64
"""Most columns in which a merged cell is repeated. A wider one is a title or a frame."""
_CELL = re.compile(r"([A-Z]{1,3})([0-9]{1,7})")
_NO_SIZE = 0.1
"""Width of a column, or height of a row, up to which nobody can see it."""
_FUTURE = re.compile(r"_xl(?:fn|ws|pm|udf)\.")
"""What stands in files, and nowhere else, before newer functions and their parameters."""
_NO_TIME = re.compile(r"T00:00(?::00)?(?:\.0+)?Z?$|\.0+Z?$|Z$")
"""What a date that is written as text ends in, and nobody sees."""
_ON = ("1", "true")


class Values:
    """Turns the content of a cell into text.

    Attributes:
        unresolved: How many formulas have no result.
    """

    def __init__(self, strings: Strings, styles: list[CellStyle | None], epoch: datetime, is_uncounted: bool = False):
        """is_uncounted: Whether a formula whose result is 0 may be one that was never calculated."""
        self.unresolved = 0
        self._strings, self._styles, self._epoch = strings, styles, epoch
        self._nothing = ("", "0") if is_uncounted else ("",)

    def formula(self, formula: str, content: str) -> str:
        """Return a formula that has no result; empty for one that has."""
        if content not in self._nothing:
            return ""
        self.unresolved += 1
        return f"={_FUTURE.sub('', formula)}" if formula else "(a formula without a result)"

    def read(self, content: str, kind: str, style: int) -> str:
        """Return the text of a cell.

        Args:
            content: Of its <v>, or of its inline text.
            kind: Its attribute `t`.
            style: Its attribute `s`.
        """
        shown = self._styles[style] if 0 <= style < len(self._styles) else None
        if kind == "e" or (shown is not None and shown.is_struck):
            return ""
        if kind == "b":
            return "TRUE" if content == "1" else "FALSE"
        if kind == "n":
            if shown is None and content.isdigit() and len(content) < 20 and content[0] != "0":
                return content
            try:
                number = float(content)
            except ValueError:
                return content
            if number != number or abs(number) == float("inf"):
                return content
            return f"{number:.15g}" if shown is None else shown.format.shown(number, self._epoch)
        if kind == "s":
            place = whole(content)
            texts = self._strings.found
            content = texts[place] if 0 <= place < len(texts) else ""
            if shown is not None and shown.font and place not in self._strings.lettered:
                content = signs(content, shown.font)
        elif kind == "str":
            content = unescaped(content)
            content = signs(content, shown.font) if shown is not None and shown.font else content
        elif kind == "inlineStr" and shown is not None and shown.font:
            content = signs(content, shown.font)
        elif kind == "d":
            content = _NO_TIME.sub("", content).replace("T", " ")
        return content if shown is None else shown.format.text(content)


class Sheet(PartHandler):
    """Collects the rows of a sheet."""

    def __init__(self, values: Values):
        self._values = values
        self._rows: list[tuple[int, bool, int, dict[int, str]]] = []
        self._row: dict[int, str] = {}
        self._number, self._column, self._hidden, self._inside = 0, -1, False, ""
        self._kind, self._style, self._last_style = "n", 0, 0
        self._content: list[str] = []
        self._formula: list[str] | None = None
        self._has_value = False
        self._shared, self._index = SharedFormulas(), ""
        self._rich = RichText()
        self._narrow, self._is_narrow = bytearray(MOST_COLUMNS), False
        self._flat = False
        self._merged: dict[int, list[tuple[int, int, int]]] = {}

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "c":
                self._column = _column(attributes.get("r", ""), self._column + 1)
                self._kind = attributes.get("t", "n")
                try:
                    self._style = int(attributes.get("s", 0))
                except ValueError:
                    self._style = -1
                self._content.clear()
                self._formula, self._has_value = None, False
            case "v":
                self._inside, self._has_value = "v", True
            case "f":
                self._inside, self._formula = "f", []
                self._index = attributes.get("si", "")
            case "row":
                self._open_row(attributes)
            case "col":
                is_narrow = attributes.get("hidden") in _ON or _is_nothing(attributes.get("width"))
                first, last = whole(attributes.get("min")), min(whole(attributes.get("max")), MOST_COLUMNS)
                if 0 < first <= last and (is_narrow or self._is_narrow):
                    self._narrow[first - 1 : last] = bytes([is_narrow]) * (last - first + 1)
                    self._is_narrow = True
            case "sheetFormatPr":
                if _is_nothing(attributes.get("defaultColWidth")):
                    self._narrow[:], self._is_narrow = b"\1" * MOST_COLUMNS, True
                self._flat = attributes.get("zeroHeight") in _ON
            case "mergeCell":
                self._merge(attributes.get("ref", ""))
            case _ if self._kind == "inlineStr":
                self._rich.start(tag, attributes)

    def end(self, tag: str) -> None:
        match tag:
            case "v" | "f":
                self._inside = ""
            case "c":
                self._end_cell()
            case "row" if self._row:
                self._rows.append((self._number, self._hidden, self._last_style, self._row))
            case _ if self._kind == "inlineStr":
                self._rich.end(tag)

    def text(self, text: str) -> None:
        if self._inside == "v":
            self._content.append(text)
        elif self._inside == "f" and self._formula is not None:
            self._formula.append(text)
        elif self._kind == "inlineStr":
            self._rich.text(text)

    def whole(self) -> Iterator[SheetRow]:
        """Yield the rows that can be seen, with merged cells repeated."""
        below, last = dict[int, tuple[int, int, str]](), 0
        for number, hidden, style, cells in self._rows:
            repeated = self._repeat(number, cells, below) if self._merged else frozenset[int]()
            is_apart, last = number > last + 1 and last > 0, number
            shown = {at: cell for at, cell in cells.items() if not self._narrow[at]} if self._is_narrow else cells
            if shown and not hidden:
                yield SheetRow(shown, is_apart, repeated & shown.keys(), style)

    def _open_row(self, attributes: Mapping[str, str]) -> None:
        self._row, self._column = {}, -1
        number = whole(attributes.get("r"))
        self._number = number if number > 0 else self._number + 1
        hidden = attributes.get("hidden")
        height = attributes.get("ht")
        self._hidden = hidden in _ON or _is_nothing(height) or (self._flat and hidden is None and height is None)

    def _end_cell(self) -> None:
        content = self._rich.whole() if self._kind == "inlineStr" else "".join(self._content)
        self._inside = ""
        is_known = self._formula is None or (self._kind == "str" and self._has_value)
        if is_known or not (value := self._values.formula(self._whole_formula(), content)):
            value = self._values.read(content, self._kind, self._style)
        self._kind = "n"
        if "\n" in value or "\r" in value:
            value = "\n".join(line.strip() for line in value.splitlines() if line.strip())
        if value := value.strip():
            self._row[min(self._column, MOST_COLUMNS - 1)] = value
            self._last_style = self._style

    def _whole_formula(self) -> str:
        """Return the formula of the cell, which may be that of another one."""
        formula = "".join(self._formula or ())
        return self._shared.formula(self._index, formula, self._number, self._column) if self._index else formula

    def _merge(self, reference: str) -> None:
        """Note a merged cell by its first row: (first column, last column, last row)."""
        first, _, last = reference.partition(":")
        if (start := _CELL.fullmatch(first)) and (end := _CELL.fullmatch(last)):
            area = (_column(start[1], 0), _column(end[1], 0), int(end[2]))
            self._merged.setdefault(int(start[2]), []).append(area)

    def _repeat(self, number: int, cells: dict[int, str], below: dict[int, tuple[int, int, str]]) -> frozenset[int]:
        """Repeat merged cells in a row. Returns the columns that repeat the cell on their left.

        below: (last row, first column, text) of the merged cells above, by column.
        """
        for first, last, end in self._merged.get(number, ()):
            text = cells.get(first, "")
            span = range(first, last + 1) if last - first < MOST_REPEATED else range(first, first + 1)
            if text and first <= last < MOST_COLUMNS:
                below.update(dict.fromkeys(span, (end, first, text)))
        repeated, labels = set[int](), dict[int, str]()
        for column in [column for column, (end, *_) in below.items() if end < number]:
            del below[column]
        for column, (_, first, text) in below.items():
            if column not in cells:
                labels[column] = text
                if column > first:
                    repeated.add(column)
        if labels:
            cells.update(labels)
            ordered = sorted(cells.items())
            cells.clear()
            cells.update(ordered)
        return frozenset(repeated)


def _is_nothing(size: str | None) -> bool:
    """Whether a width or a height is too small to be seen."""
    try:
        return size is not None and float(size) <= _NO_SIZE
    except ValueError:
        return False


def _column(reference: str, following: int) -> int:
    """Return the column of a cell reference such as `C7`, from 0 on; `following` where there is none."""
    column = 0
    for letter in reference[:3]:
        if not "A" <= letter <= "Z":
            break
        column = 26 * column + ord(letter) - ord("A") + 1
    return column - 1 if column else following
