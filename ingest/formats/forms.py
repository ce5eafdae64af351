"""Forms in spreadsheets: a label and its value in each row, which name no columns.

Name:    Vala          Invoice     42
Town:    Orrin         Customer    Vala
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from ragkv.ingest.formats.column_words import name_columns
from ragkv.ingest.formats.sheet_rows import AHEAD, YEAR, SheetRow, is_value


def form_length(rows: Sequence[SheetRow]) -> int:
    """Return how many of the first rows are a form. rows: those that are ahead."""
    first = rows[0]
    if not (is_labelled := _is_labelled(first)) and (len(first.cells) != 2 or first.repeated):
        return 0
    block = [first, *takewhile(lambda row: not row.is_apart, islice(rows, 1, None))]
    if is_labelled:
        return sum(1 for _ in takewhile(_is_labelled, block))
    pairs = [list(row.cells.values()) for row in takewhile(lambda row: row.cells.keys() == first.cells.keys(), block)]
    if len(pairs) < 2 or YEAR.fullmatch(pairs[0][1]) or any(is_value(label) for label, _ in pairs):
        return 0
    are_names = not name_columns(pairs[0][1:]) and all(name_columns([label]) for label, _ in pairs)
    if not are_names and not all(is_value(value) for _, value in pairs):
        return 0
    return len(pairs) if len(pairs) < AHEAD else AHEAD - 2  # two rows show that the rest goes on with it


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


def _is_labelled(row: SheetRow) -> bool:
    """Whether a row begins with a label that has a colon, and its value."""
    cells = list(row.cells.values())
    if len(cells) < 2 or len(row.cells) - len(row.repeated) < 2:
        return False
    return cells[1] == ":" or (cells[0].endswith(":") and not cells[1].endswith(":") and cells[0] != ":")
