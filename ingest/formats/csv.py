"""CSV to text. Each row becomes a paragraph, and each cell a line that starts with the name of its column:

    name,town            name: Ada
    Ada,Tarn      →      town: Tarn

A chunk that holds such a row can be found and understood without the rest of the table.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats.base import Parsed, TextRoom, without_headings
from ragkv.ingest.formats.charsets import decode_plain
from ragkv.ingest.formats.records import Records
from ragkv.ingest.formats.sheet_rows import SheetRow, filled

DELIMITERS = ",;\t|"
SAMPLE_ROWS = 50
"""Rows that are used to detect the delimiter."""
_SAMPLE = 65536
_STATED = re.compile(r'"?sep ?= ?(\\t|[^\n" ])"?[,;\t| ]*+\n', re.IGNORECASE)
"""How spreadsheets state the delimiter in a line of its own, which some programs fill with delimiters."""
_RULE = re.compile(r"[-=+_]{3,}")
"""A cell of the lines that are drawn between rows."""

_SINGLE = re.compile(r"'[^'\n]*+'(?:[,;\t|]'[^'\n]*+')++\n")
"""A first row in single quotation marks, as some databases write them."""
_SPELLED = re.compile(r'="([^"]*)"')
"""How some programs write a text that looks like a number, so that Excel keeps its zeros: `="01067"`."""


def parse(data: bytes, limit: int) -> Parsed:
    """Parse CSV. The first row names the columns, unless it is like those below it: then columns are numbered.

    Titles and comments above that row are paragraphs. The metadata says so where the file is not UTF-8.

    Raises:
        InvalidDocument: The file is not CSV, or has no rows.
        TooLarge: The text has over `limit` bytes.
    """
    text, encoding = decode_plain(data, "save it as CSV UTF-8")
    csv.field_size_limit(max(limit, 1))
    stated = _STATED.match(text)
    text = text[stated.end() :] if stated else text
    records = Records(TextRoom(limit), single=True)
    records.write(_rows(text, stated[1].replace("\\t", "\t") if stated else _delimiter(text)))
    if not records.count:
        raise InvalidDocument("it has no rows under its header" if text.strip(" \n,;\t|") else "it is empty")
    said = {} if encoding == "utf-8" else {"encoding": encoding}
    return Parsed(
        "", without_headings("\n\n".join(records.paragraphs)), {"format": "csv", "rows": records.count, **said}
    )


def _delimiter(text: str) -> str:
    """Return the delimiter that gives most rows the same number of cells, the most of them; by default a comma."""
    sample = text if len(text) <= _SAMPLE else text[: text.rfind("\n", 0, _SAMPLE) + 1]
    best, most = ",", (0, 0)
    for delimiter in DELIMITERS:
        widths, lines = Counter[int](), io.StringIO(sample, newline="")
        try:
            for row in islice(
                csv.reader(lines, delimiter=delimiter, quotechar=_quote(text), skipinitialspace=True), SAMPLE_ROWS
            ):
                widths[len(row)] += len(row) > 1
        except csv.Error:
            continue
        width, alike = max(widths.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
        if width > 1 and (alike, width) > most:
            best, most = delimiter, (alike, width)
    return best


def _quote(text: str) -> str:
    """Return the quotation mark of a file."""
    return "'" if text[:1] == "'" and _SINGLE.match(text) else '"'


def _is_strict(text: str, delimiter: str) -> bool:
    """Whether quotation marks are doubled inside of quotations; databases write a backslash before them instead."""
    try:
        for _ in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True):
            pass
    except csv.Error:
        return False
    return True


def _rows(text: str, delimiter: str) -> Iterator[SheetRow]:
    """Yield the rows that are not empty, with stripped cells. Raises InvalidDocument."""
    lines, quote, escape, strict = io.StringIO(text, newline=""), _quote(text), None, True
    if '\\"' in text and not _is_strict(text, delimiter):
        escape, strict = "\\", False
    elif f'" {delimiter}' in text:  # no mark ends a cell where a space stands behind it
        strict = False
    reader = csv.reader(
        lines, delimiter=delimiter, quotechar=quote, escapechar=escape, strict=strict, skipinitialspace=True
    )
    line, is_apart, is_spelled = 1, False, '="' in text
    has_rules = any(rule in text for rule in ("---", "===", "+++", "___"))
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InvalidDocument(f"line {line} (to {reader.line_num}): {error}") from None
        if row is None:
            return
        line = reader.line_num + 1
        cells = filled(map(str.strip, row))
        if has_rules and cells and all(map(_RULE.fullmatch, cells.values())):
            continue
        if cells:
            if is_spelled:
                cells = {at: _SPELLED.sub(r"\1", cell) if cell[:2] == '="' else cell for at, cell in cells.items()}
            yield SheetRow(cells, is_apart)
        is_apart = not cells
