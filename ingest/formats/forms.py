"""First rows of spreadsheets that name no columns: forms, and rows like those below them.

A form has a label and its value in each row:

    Name:    Vala          Invoice     42
    Town:    Orrin         Customer    Vala
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice, pairwise, takewhile

from ragkv.ingest.formats.column_words import name_columns
from ragkv.ingest.formats.sheet_rows import AHEAD, YEAR, SheetRow, is_value

_NAMES = re.compile(r"\d{4}[-./]\d\d?(?:[-./]\d\d?)?|\d\d?[-./]\d\d?[-./]\d{2,4}")
"""Dates, which may name columns, as years do."""
_FIGURES = re.compile(r"[+-]?\d[\d.,]*")


def form_length(rows: Sequence[SheetRow]) -> int:
    """Return how many of the first rows are a form. rows: those that are ahead."""
    first = rows[0]
    if len(first.cells) < 2:
        return 0
    if not (is_labelled := _is_labelled(first)) and (len(first.cells) != 2 or first.repeated):
        return 0
    block = [first, *takewhile(lambda row: not row.is_apart, islice(rows, 1, None))]
    if is_labelled:
        return sum(1 for _ in takewhile(_is_labelled, block))
    pairs = [list(row.cells.values()) for row in takewhile(lambda row: row.cells.keys() == first.cells.keys(), block)]
    if len(pairs) < 2 or YEAR.fullmatch(pairs[0][1]) or any(is_value(label) for label, _ in pairs):
        return 0
    if not _is_form([label for label, _ in pairs], [value for _, value in pairs]):
        return 0
    return len(pairs) if len(pairs) < AHEAD else AHEAD - 2  # two rows show that the rest goes on with it


def is_note_form(rows: Sequence[SheetRow]) -> bool:
    """Whether the first rows, behind a table, are a form and no totals of it: `Made by: Vala`."""
    labelled = list(takewhile(_is_labelled, rows))
    return len(labelled) > 1 and not all(is_value(list(row.cells.values())[-1]) for row in labelled)


def form_lines(row: SheetRow) -> str:
    """Return a row of a form: `Name: Vala`, in a line for each label."""
    cells = [" ".join(cell.split("\n")) for at, cell in row.cells.items() if at not in row.repeated]
    if not _is_labelled(row):
        return f"{cells[0]}: {cells[1]}"
    lines = list[str]()
    for cell in cells:
        if cell == ":" and lines:
            lines[-1] += cell
        elif lines and lines[-1].endswith(":"):
            lines[-1] += f" {cell}"
        else:
            lines.append(cell)
    return "\n".join(lines)


def is_row(row: SheetRow, below: Sequence[SheetRow]) -> bool:
    """Whether the first row of a table has values like those below it, and no names."""
    block = list(takewhile(lambda other: not other.is_apart, below))
    values = {at: cell for at, cell in row.cells.items() if is_value(cell) and not YEAR.fullmatch(cell)}
    if not values or not block or name_columns(row.cells.values()) or not row.is_styled_like(block):
        return False
    numbers = [int(cell) for cell in values.values() if cell.isdecimal()]
    steps = {right - left for left, right in pairwise(numbers)}
    if len(numbers) == len(values) and (steps == {1} or (len(numbers) > 2 and len(steps) == 1)):  # hours, sizes
        return False
    return all(_figures(other.cells.get(at, "")) == _figures(cell) for at, cell in values.items() for other in block)


def _figures(cell: str) -> str:
    """Return how a value is written, whatever its figures are: a date, a number, one with a unit."""
    return _FIGURES.sub("0", cell)


def _is_form(labels: Sequence[str], values: Sequence[str]) -> bool:
    """Whether texts are labels of the values beside them, and the first ones no names of columns.

    The labels are words that columns are called by, or the first value is a quantity, or they have several units.
    """
    if name_columns(values[:1]):
        return False
    units = {_FIGURES.sub("", value).strip() for value in values if is_value(value)} - {""}
    is_quantity = is_value(values[0]) and not _NAMES.fullmatch(values[0])
    return is_quantity or len(units) > 1 or all(name_columns([label]) for label in labels)


def _is_labelled(row: SheetRow) -> bool:
    """Whether a row begins with a label that has a colon, and its value."""
    cells = list(row.cells.values())
    if len(cells) < 2 or len(row.cells) - len(row.repeated) < 2:
        return False
    return cells[1] == ":" or (cells[0].endswith(":") and not cells[1].endswith(":") and cells[0] != ":")
