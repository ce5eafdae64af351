"""Excel workbooks to text, sheet by sheet. A sheet is a heading, and to a citation what a page is.

    xl/workbook.xml             the sheets, in order
    xl/sharedStrings.xml        texts that cells refer to
    xl/styles.xml               which cells hold dates, times and percentages
    xl/worksheets/sheet1.xml    rows of cells (c) with values (v)

Each row is a paragraph of lines `column: value`, as in csv.py. The first row of a sheet with several filled cells names
the columns, unless it is all numbers. A formula is its last result. Hidden sheets and rows, errors, charts and macros
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import PurePosixPath

from ingest.formats.base import Parsed, TextRoom, one_line, without_controls
from ingest.formats.csv import column_names
from ingest.formats.package import LINK, Package, PartHandler, open_package
from ragkv.errors import InvalidDocument

_BETWEEN = "\n\n"
_BUILT_IN = {**dict.fromkeys((9, 10), "%"), **dict.fromkeys((*range(14, 23), *range(45, 48)), "d")}
"""Kinds of the built-in number formats: percentage, or date and time."""
_QUOTED = re.compile(r'"[^"]*"|\\.|\[[^\[\]]*\]|_.')
_LETTERS = re.compile(r"[A-Z]{1,3}")
_LATEST = 2_958_466
"""First serial number behind the year 9999."""


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a workbook. The title comes from its properties.

    Raises:
        InvalidDocument: The file is no workbook, is damaged or has a password.
        TooLarge: The text has over `limit` bytes, or its parts over UNPACKED_BYTES.
    """
    with open_package(data, "Excel workbook", ".xls") as package:
        return _parse(package, limit)


def _parse(package: Package, limit: int) -> Parsed:
    main = package.document("xl/workbook.xml")
    workbook = _Workbook()
    package.read(main, workbook)
    if workbook.root != "workbook":
        raise InvalidDocument("it is no Excel workbook, but another archive")
    folder, links, room = PurePosixPath(main).parent, package.links(main), TextRoom(limit)
    strings, styles = _Strings(), _Styles()
    package.read(str(folder / "sharedStrings.xml"), strings)
    package.read(str(folder / "styles.xml"), styles)
    values = _Values(strings.found, styles.kinds(), workbook.epoch)
    texts, pages, length = list[str](), list[tuple[int, int]](), 0
    for number, (name, link) in enumerate(workbook.sheets, 1):
        sheet = _Sheet(values, room)
        if link in links and name is not None:
            package.read(links[link].target, sheet)
        if sheet.paragraphs and name is not None:
            text = without_controls(_BETWEEN.join([f"## {one_line(name)}", *sheet.paragraphs]))
            pages.append((length, number))
            texts.append(text)
            length += len(text) + len(_BETWEEN)
    title = one_line(package.title())
    return Parsed(title, _BETWEEN.join(texts), {"format": "xlsx", "sheets": len(workbook.sheets)}, tuple(pages))


class _Workbook(PartHandler):
    """Collects (name, relationship) of the sheets, in order; a hidden sheet has no name."""

    def __init__(self) -> None:
        self.root, self.sheets, self.epoch = "", list[tuple[str | None, str]](), datetime(1899, 12, 30)

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.root = self.root or tag
        if tag == "workbookPr" and attributes.get("date1904") in ("1", "true"):
            self.epoch = datetime(1904, 1, 1)
        elif tag == "sheet":
            hidden = attributes.get("state", "visible") != "visible"
            self.sheets.append((None if hidden else attributes.get("name", ""), attributes.get(LINK, "")))


class _Strings(PartHandler):
    """Collects the shared texts. Readings of Japanese words (rPh) are left out."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._parts: list[str] = []
        self._text, self._phonetic = False, False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._phonetic = self._phonetic or tag == "rPh"
        self._text = tag == "t" and not self._phonetic

    def end(self, tag: str) -> None:
        self._text = False
        if tag == "rPh":
            self._phonetic = False
        elif tag == "si":
            self.found.append("".join(self._parts))
            self._parts.clear()

    def text(self, text: str) -> None:
        if self._text:
            self._parts.append(text)


class _Styles(PartHandler):
    """Collects the number format of each cell style."""

    def __init__(self) -> None:
        self._codes: dict[int, str] = {}
        self._formats: list[int] = []
        self._inside = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "numFmt":
            self._codes[_whole(attributes.get("numFmtId"))] = attributes.get("formatCode", "")
        elif tag == "cellXfs":
            self._inside = True
        elif tag == "xf" and self._inside:
            self._formats.append(_whole(attributes.get("numFmtId")))

    def end(self, tag: str) -> None:
        if tag == "cellXfs":
            self._inside = False

    def kinds(self) -> list[str]:
        """Return for each style `d` for dates and times, `%` for percentages, else an empty text."""
        kinds = {**_BUILT_IN, **{number: _kind(code) for number, code in self._codes.items()}}
        return [kinds.get(number, "") for number in self._formats]


class _Values:
    """Turns the content of a cell into text."""

    def __init__(self, strings: list[str], kinds: list[str], epoch: datetime):
        self._strings, self._kinds, self._epoch = strings, kinds, epoch

    def read(self, content: str, kind: str, style: int) -> str:
        """Return the text of a cell.

        Args:
            content: Of its <v>, or of its inline text.
            kind: Its attribute `t`.
            style: Its attribute `s`.
        """
        if kind == "s":
            place = _whole(content)
            return self._strings[place] if 0 <= place < len(self._strings) else ""
        if kind == "b":
            return "TRUE" if content == "1" else "FALSE"
        if kind == "e":
            return ""
        if kind != "n":
            return content
        try:
            number = float(content)
        except ValueError:
            return content
        shown = self._kinds[style] if 0 <= style < len(self._kinds) else ""
        if shown == "d" and 0 <= number < _LATEST:
            return _moment(self._epoch, number)
        return f"{100 * number:.15g}%" if shown == "%" else f"{number:.15g}"


class _Sheet(PartHandler):
    """Writes a paragraph for each row."""

    def __init__(self, values: _Values, room: TextRoom):
        self.paragraphs: list[str] = []
        self._values, self._room = values, room
        self._names: dict[int, str] | None = None
        self._row: dict[int, str] = {}
        self._column, self._hidden, self._inside = -1, False, False
        self._kind, self._style = "n", 0
        self._content: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        match tag:
            case "row":
                self._row, self._column = {}, -1
                self._hidden = attributes.get("hidden") in ("1", "true")
            case "c":
                self._column = _column(attributes.get("r", ""), self._column + 1)
                self._kind, self._style = attributes.get("t", "n"), _whole(attributes.get("s", "0"))
                self._content.clear()
            case "v":
                self._inside = True
            case "t":
                self._inside = self._kind == "inlineStr"

    def end(self, tag: str) -> None:
        match tag:
            case "v" | "t":
                self._inside = False
            case "c":
                value = self._values.read("".join(self._content), self._kind, self._style)
                if value := "\n".join(line.strip() for line in value.splitlines() if line.strip()):
                    self._row[self._column] = self._room.take(value)
            case "row" if self._row and not self._hidden:
                self._end_row()

    def text(self, text: str) -> None:
        if self._inside:
            self._content.append(text)

    def _end_row(self) -> None:
        row, self._row = self._row, {}
        if self._names is None and len(row) == 1:
            self.paragraphs.extend(row.values())  # a line above the table
            return
        if self._names is None:
            names = column_names(list(row.values()))
            self._names = dict(zip(row, names, strict=True)) if names else {}
            if names:
                return
        named = self._names
        lines = [self._room.take(f"{named.get(at) or f'column {at + 1}'}: ") + value for at, value in row.items()]
        self.paragraphs.append("\n".join(lines))


def _moment(epoch: datetime, number: float) -> str:
    """Return a date, a time, or both. Times are rounded to seconds."""
    moment = epoch + timedelta(seconds=round(number * 86400))
    if number < 1:
        return moment.strftime("%H:%M:%S")
    return moment.strftime("%Y-%m-%d" if moment.time() == epoch.time() else "%Y-%m-%d %H:%M:%S")


def _kind(code: str) -> str:
    """Return what a number format shows: `d` for dates and times, `%` for percentages, else an empty text."""
    bare = _QUOTED.sub("", code).lower()
    if bare.startswith("general"):
        return ""
    return "d" if re.search("[ymdhs]", bare) else "%" if "%" in bare else ""


def _column(reference: str, following: int) -> int:
    """Return the column of a cell reference such as `C7`, from 0 on; `following` where there is none."""
    letters = _LETTERS.match(reference)
    if letters is None:
        return following
    column = 0
    for letter in letters[0]:
        column = 26 * column + ord(letter) - ord("A") + 1
    return column - 1


def _whole(text: str | None) -> int:
    """Return a whole number; -1 for any other text."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else -1
