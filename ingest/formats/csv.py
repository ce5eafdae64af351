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
from collections.abc import Iterator, Sequence
from itertools import islice

from ingest.formats.base import Parsed, TextRoom
from ingest.formats.charsets import decode_table
from ragkv.errors import InvalidDocument

DELIMITERS = ",;\t|"
SAMPLE_ROWS = 50
"""Rows that are used to detect the delimiter."""
_SAMPLE = 65536
_NUMBER = re.compile(r"[+-]?[.,\s]*+\d[\d.,\s]*+%?")


def parse(data: bytes, limit: int) -> Parsed:
    """Parse CSV. The first row names the columns, unless it is all numbers: then columns are numbered.

    Raises:
        InvalidDocument: The file is not CSV, or has no rows.
        TooLarge: The text has over `limit` bytes.
    """
    text, encoding = decode_table(data)
    csv.field_size_limit(max(limit, 1))
    rows = _rows(text, _delimiter(text))
    first = next(rows, None)
    if first is None:
        raise InvalidDocument("it is empty")
    names, room, paragraphs, count = column_names(first), TextRoom(limit), [], 0
    if not names:
        paragraphs.append(row_paragraph(names, first, room))
        count = 1
    for row in rows:
        paragraphs.append(row_paragraph(names, row, room))
        count += 1
    if not paragraphs:
        raise InvalidDocument("it has no rows under its header")
    said = {} if encoding == "utf-8" else {"encoding": encoding}
    return Parsed("", "\n\n".join(paragraphs), {"format": "csv", "rows": count, **said})


def _delimiter(text: str) -> str:
    """Return the delimiter that gives most rows the same number of cells, at least two; by default a comma."""
    sample = text if len(text) <= _SAMPLE else text[: text.rfind("\n", 0, _SAMPLE) + 1]
    best, most = ",", 0
    for delimiter in DELIMITERS:
        widths: Counter[int] = Counter()
        try:
            for row in islice(csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter), SAMPLE_ROWS):
                widths[len(row)] += len(row) > 1
        except csv.Error:
            continue
        width, alike = max(widths.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
        if width > 1 and alike > most:
            best, most = delimiter, alike
    return best


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    """Yield the rows that are not empty, with stripped cells. Raises InvalidDocument."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InvalidDocument(f"line {line} (to {reader.line_num}): {error}") from None
        if row is None:
            return
        line = reader.line_num + 1
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield cells


def column_names(row: Sequence[str]) -> list[str]:
    """Return the row if it names columns: its cells are all different, and not all numbers. Else return []."""
    names = [" ".join(name.split()) for name in row]
    filled = [name for name in names if name]
    return names if len(set(filled)) == len(filled) and not all(map(_NUMBER.fullmatch, filled)) else []


def row_paragraph(names: Sequence[str], row: Sequence[str], room: TextRoom) -> str:
    lines = []
    for number, cell in enumerate(row):
        if cell:
            name = (names[number] if number < len(names) else "") or f"column {number + 1}"
            value = "\n".join(line for line in cell.split("\n") if line.strip())  # an empty line would split the row
            lines.append(room.take(f"{name}: {value}"))
    return "\n".join(lines)
