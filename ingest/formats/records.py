"""Rows of a spreadsheet to paragraphs: each cell is a line that starts with the name of its column.

    Staff list of 2026        →         a title
    Name     Town                       Name: Vala
    Vala     Orrin                      Town: Orrin

The names are found below titles and comments. A second table, below an empty row or beside it, has names of its own.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from ragkv.ingest.formats.base import TextRoom
from ragkv.ingest.formats.column_words import name_columns
from ragkv.ingest.formats.forms import form_length, form_lines, is_note_form, is_row
from ragkv.ingest.formats.sheet_rows import AHEAD, YEAR, SheetRow, TablesBeside, is_value

TITLE_SHARE = 0.67
"""A row above the names that fills no more than this share of their columns is a title."""
_ABOVE = 50
"""Rows above an empty one that are compared with those below."""
_LONGEST_NAME = 60
"""Characters of the name of a column, unless the first row has longer ones."""
_REMARK = re.compile(r"[*†‡]|(?:notes?|sources?|remarks?|quellen?|hinweise?|anmerkung(?:en)?)\s*:", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[.,\s]*+\d[\d.,\s]*+%?")


def column_names(row: Sequence[str]) -> list[str]:
    """Return the row if it names columns: its cells are no colons, and not all numbers or the same. Else return [].

    A name that occurs again has a number: `Amount`, `Amount (2)`.
    """
    names = [" ".join(name.split()) for name in row]
    filled = list(filter(None, names))
    if ":" in filled or all(map(_NUMBER.fullmatch, filled)) or (len(filled) > 1 and len(set(filled)) == 1):
        return []
    seen = dict[str, int]()
    for at, name in enumerate(names):
        while name and names[at] in seen:
            seen[name] += 1
            names[at] = f"{name} ({seen[name]})"
        seen[names[at]] = 1
    return names


class Records:
    """Writes rows into paragraphs.

    Attributes:
        paragraphs: What was written.
        count: How many rows of tables, without names and titles.
    """

    def __init__(self, room: TextRoom, single: bool = False):
        """single: Whether one column alone may have a name."""
        self.paragraphs: list[str] = []
        self.count = 0
        self._room, self._single = room, single
        self._names: dict[int, str] | None = None
        self._header = SheetRow({})
        self._above = deque[SheetRow](maxlen=_ABOVE)

    def write(self, rows: Iterator[SheetRow]) -> None:
        """Write all rows. Raises TooLarge."""
        beside = TablesBeside()
        self._write(beside.left(rows))
        if beside.right:
            others = Records(self._room, self._single)
            others.write(iter(beside.right))
            self.paragraphs += others.paragraphs
            self.count += others.count

    def _write(self, rows: Iterator[SheetRow]) -> None:
        """Write the rows of tables that are above each other."""
        ahead = deque(islice(rows, AHEAD))
        while ahead:
            taken = 0
            if self._names is None or ahead[0].is_apart:
                ahead.extend(islice(rows, AHEAD - len(ahead)))
                taken = form_length(ahead) if not self._names or is_note_form(ahead) else 0
                self._write_form([ahead.popleft() for _ in range(taken)])
                for _ in range(0 if taken else self._open_table(ahead)):
                    ahead.popleft()
            if ahead and not taken:
                self._write_row(ahead.popleft())
            if not ahead:
                ahead.extend(islice(rows, AHEAD))
        self._close_table()

    def _close_table(self) -> None:
        """Write the names of the last table where most of them name nothing, for they are text, too."""
        named = sum(any(at in row.cells for row in self._above) for at in self._names or ())
        if self._names and 2 * named < len(self._names) and (self.count or not self._single):
            self._write_title(SheetRow(self._names))

    def _open_table(self, ahead: Sequence[SheetRow]) -> int:
        """Take the names of a table and write the titles above them. Returns how many rows that were."""
        first = self._names is None
        at = (
            _first_header(ahead, self._single and not self.count)
            if first
            else _next_header(ahead, self._names or {}, self._header, self._above)
        )
        if at is None:
            if first and not ahead[0].is_single:
                self._names = {}
            return 0
        self._close_table()
        for row in islice(ahead, at):
            self._write_title(row)
        header = upper = ahead[at]
        cells, taken = header.cells, at + 1
        while len(ahead) > taken + 1 and _is_second(upper, ahead[taken]):
            upper, taken = ahead[taken], taken + 1
            cells = _combined(cells, upper.cells)
            if not upper.repeated:
                break
        self._names = dict(zip(cells, column_names(list(cells.values())), strict=True))
        self._header = header
        self._above.clear()
        return taken

    def _write_form(self, rows: Sequence[SheetRow]) -> None:
        """Write rows of labels and their values."""
        if rows:
            self.paragraphs.append(self._room.take("\n".join(map(form_lines, rows))))
            self.count += len(rows)

    def _write_title(self, row: SheetRow) -> None:
        cells = (_lines(cell) for at, cell in row.cells.items() if at not in row.repeated)
        self.paragraphs.append(self._room.take(" | ".join(cells)))

    def _write_row(self, row: SheetRow) -> None:
        cells = row.cells
        if self._names is None or (
            row.is_single and self._names and (row.repeated or _is_remark(cells, len(self._names)))
        ):
            self._write_title(row)
            return
        if cells == self._header.cells:  # names that are printed on each page
            return
        names = self._names
        lines = [f"{names.get(at) or f'column {at + 1}'}: {cell}" for at, cell in cells.items()]
        paragraph = "\n".join(lines)
        if paragraph.count("\n") >= len(lines):  # cells have lines of their own
            paragraph = _lines(paragraph)
        self.paragraphs.append(self._room.take(paragraph))
        self.count += 1
        self._above.append(row)


def _lines(cell: str) -> str:
    """Return a cell without empty lines, which would split its row."""
    return "\n".join(line for line in cell.split("\n") if line.strip()) if "\n" in cell else cell


def _first_header(ahead: Sequence[SheetRow], single: bool) -> int | None:
    """Return which row names the columns of the first table; None where the rows name none."""
    for at, row in enumerate(ahead):
        following = ahead[at + 1] if at + 1 < len(ahead) else None
        if following is not None and _is_comment(row.cells) and _is_named_below(row, following):
            continue
        if row.is_single:
            if single and not any(_is_names(ahead, later) for later in range(at + 1, len(ahead))):
                return at if _names(row) else None
            continue
        is_years = row.repeated and following is not None and all(map(YEAR.fullmatch, row.cells.values()))
        if is_years and following is not None and _is_second(row, following):
            return at
        if not _names(row) or (at and form_length(list(islice(ahead, at, None)))):
            return None
        later = range(at + 1, len(ahead))
        if following is not None and following.is_single and any(_is_names(ahead, place) for place in later):
            continue
        if following is not None and _is_title(row, following, not at or row.is_apart, at + 2 < len(ahead)):
            continue
        return None if is_row(row, list(islice(ahead, at + 1, None))) else at
    return None


def _is_names(ahead: Sequence[SheetRow], at: int) -> bool:
    """Whether a row of several texts could name the columns of a row below it."""
    row = ahead[at]
    return not row.is_single and row.is_text and at + 1 < len(ahead) and len(ahead[at + 1].cells) > 1


def _is_title(row: SheetRow, following: SheetRow, alone: bool, more: bool) -> bool:
    """Whether a row is a title above the names of columns, and not these names themselves."""
    below = following.cells.values()
    has_names = not any(is_value(cell) and not YEAR.fullmatch(cell) for cell in below)
    is_names = name_columns(row.cells.values()) and not name_columns(below)
    if is_names or not more or len(below) < 2 or not has_names or 0 not in row.cells:
        return False
    if following.is_apart and alone and (row.cells.keys() != following.cells.keys() or not row.is_text):
        return True
    return len(row.cells) < TITLE_SHARE * len(following.cells)


def _next_header(
    ahead: Sequence[SheetRow], names: Mapping[int, str], header: SheetRow, above: Collection[SheetRow]
) -> int | None:
    """Return which row names the columns of a further table; None where the rows go on with the one above.

    Args:
        ahead: The rows behind an empty one.
        names: Names of the columns of the table above.
        header: The row of these names.
        above: Its last rows.
    """
    end = next((at for at in range(1, len(ahead)) if ahead[at].is_apart), len(ahead))
    for at in range(end - 1):
        row, following = ahead[at], ahead[at + 1]
        if row.is_single:
            continue
        if not row.is_text or not _names(row) or len(following.cells) < 2:
            return None
        values = (column for column, cell in following.cells.items() if is_value(cell))
        is_new = at > 0 or not row.cells.keys() <= names.keys() or any(column in row.cells for column in values)
        below = [ahead[place] for place in range(at + 1, end)]
        return at if is_new or not _goes_on(row, below, header, above) else None
    return None


def _goes_on(row: SheetRow, below: Sequence[SheetRow], header: SheetRow, above: Collection[SheetRow]) -> bool:
    """Whether a row of texts behind an empty row goes on with the table above, rather than naming columns.

    Where styles tell names from rows, they tell it. Else a row goes on that has a text of the column above again, that
    looks like the rows of a column whose name looks like none of them, or that has no word that columns are called by
    where the names have one.
    """
    if not above:
        return False
    if header.style >= 0 and any(header.style != other.style for other in above):
        return row.style in {other.style for other in above} and row.style != header.style
    if header.cells.keys() != row.cells.keys() or set(header.cells.values()) & set(row.cells.values()):
        return False
    if any(len(cell) > _LONGEST_NAME for cell in row.cells.values()):
        return True
    for column, cell in row.cells.items():
        earlier = {other.cells[column] for other in above if column in other.cells}
        if any(other.cells.get(column) in earlier for other in (row, *below)):
            return True
        kinds = set(map(_kind, earlier))
        if _kind(header.cells[column]) not in kinds and _kind(cell) in kinds:
            return all(_kind(other.cells[column]) in kinds for other in below if column in other.cells)
    return name_columns(header.cells.values()) and not name_columns(row.cells.values())


def _kind(cell: str) -> tuple[bool, ...]:
    """Return what a text looks like: whether it has words, figures, signs of an address, and a capital."""
    return " " in cell, any(map(str.isdigit, cell)), "@" in cell or "/" in cell, cell[:1].isupper()


def _is_second(header: SheetRow, below: SheetRow) -> bool:
    """Whether the names of columns go on in a second row: `Shift` above `day` and `night`."""
    if not below.is_text or len(below.cells) < 2:
        return False
    upper, lower = header.cells, below.cells
    if header.repeated:
        spanned = header.repeated | {column - 1 for column in header.repeated}
        others = (column for column in lower if column not in spanned)
        return header.repeated <= lower.keys() and all(upper.get(at, lower[at]) == lower[at] for at in others)
    twins = {at for at, name in upper.items() if at and upper.get(at - 1) == name}
    if twins and min(lower) > min(upper):  # names that were repeated where cells had been merged
        return lower.keys() == twins | {at - 1 for at in twins}
    missing = lower.keys() - upper.keys()
    return bool(missing) and min(lower) > min(upper) and all(at in missing or at + 1 in missing for at in lower)


def _combined(upper: Mapping[int, str], lower: Mapping[int, str]) -> dict[int, str]:
    """Return the names of two rows in one. A name in the upper row goes on to the right where the lower row has one."""
    names, above = dict[int, str](), ""
    for at in sorted(upper.keys() | lower.keys()):
        above = upper.get(at, above if at in lower else "")
        names[at] = above if lower.get(at) == above else f"{above} {lower.get(at, '')}".strip()
    return names


def _names(row: SheetRow) -> list[str]:
    return column_names(list(row.cells.values()))


def _is_named_below(comment: SheetRow, following: SheetRow) -> bool:
    """Whether the row below a comment names the columns, and not the comment: `# made in 2026, by Timo`."""
    cells, below = comment.cells.values(), following.cells.values()
    is_sentence = comment.cells[0][1:2] == " " and not name_columns(cells) and name_columns(below)
    return len(cells) != len(below) or is_sentence


def _is_comment(cells: Mapping[int, str]) -> bool:
    return cells.get(0, "").startswith("#")


def _is_remark(cells: Mapping[int, str], columns: int) -> bool:
    """Whether a row of one text says something of a table: `# made in 2026`, `Source: the office`."""
    return _is_comment(cells) or (columns > 1 and _REMARK.match(next(iter(cells.values()))) is not None)
