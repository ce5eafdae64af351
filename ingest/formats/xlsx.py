"""Excel workbooks to text, sheet by sheet. A sheet is a heading, which names it in citations.

    xl/workbook.xml             the sheets, in order
    xl/sharedStrings.xml        texts that cells refer to
    xl/styles.xml               how cells show their numbers (number_formats.py), and which are struck out
    xl/worksheets/sheet1.xml    rows of cells (c) with values (v)    (sheets.py)

Each row is a paragraph of lines `column: value` (records.py). A formula is its last result; one that has none, or a 0
in its place, is kept as it is, and the metadata says so. Hidden sheets, rows and columns, errors, charts and macros are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePosixPath

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats.base import Parsed, TextRoom, one_line, without_controls, without_headings
from ragkv.ingest.formats.cell_styles import CellStyles, Strings
from ragkv.ingest.formats.package import LINK, Package, PartHandler, open_package
from ragkv.ingest.formats.records import Records
from ragkv.ingest.formats.sheets import Sheet, Values

_BETWEEN = "\n\n"
_UNRESOLVED = (
    "formulas have no stored result and are kept as formulas; a spreadsheet program that saves the file adds it"
)


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
    strings, styles = Strings(), CellStyles()
    package.read(str(folder / "sharedStrings.xml"), strings)
    package.read(str(folder / "styles.xml"), styles)
    values = Values(strings, styles.whole(), workbook.epoch, workbook.is_uncounted)
    texts = list[str]()
    for name, link in workbook.sheets:
        sheet = Sheet(values)
        if link in links and name is not None:
            package.read(links[link].target, sheet)
        records = Records(room)
        records.write(sheet.whole())
        if records.paragraphs and name is not None:
            body = without_headings(_BETWEEN.join(records.paragraphs))
            texts.append(without_controls(f"## {one_line(name)}{_BETWEEN}{body}"))
    metadata: dict[str, object] = {"format": "xlsx", "sheets": len(workbook.sheets)}
    if values.unresolved:
        metadata["warnings"] = [f"{values.unresolved} {_UNRESOLVED}"]
    return Parsed(one_line(package.title()), _BETWEEN.join(texts), metadata)


class _Workbook(PartHandler):
    """Collects (name, relationship) of the sheets, in order; a hidden sheet has no name.

    Attributes:
        is_uncounted: Whether its formulas have yet to be calculated, as libraries that write workbooks say.
    """

    def __init__(self) -> None:
        self.root, self.sheets, self.epoch = "", list[tuple[str | None, str]](), datetime(1899, 12, 30)
        self.is_uncounted = False

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self.root = self.root or tag
        if tag == "workbookPr" and attributes.get("date1904") in ("1", "true"):
            self.epoch = datetime(1904, 1, 1)
        elif tag == "calcPr":
            self.is_uncounted = attributes.get("fullCalcOnLoad") in ("1", "true")
        elif tag == "sheet":
            hidden = attributes.get("state", "visible") != "visible"
            self.sheets.append((None if hidden else attributes.get("name", ""), attributes.get(LINK, "")))
