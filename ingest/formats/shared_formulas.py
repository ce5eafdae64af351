"""Formulas that cells of a sheet share: one cell has it, and the others say only that theirs is the same, moved.

C2: B2*$D$1    C3 shares it    C3: B3*$D$1
"""

from __future__ import annotations

import re

from ragkv.ingest.formats.numbering import written

_REFERENCE = re.compile(
    r"\"[^\"]*+\"|'[^']*+'|(?<![\w.$])(\$?)([A-Z]{1,3})(\$?)([1-9]\d{0,6})(?![\w(.])|[\w.]+", re.ASCII
)
_LONGEST = 8192
"""Characters of a formula."""


class SharedFormulas:
    """The formulas of a sheet that are shared, by their index."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, int, int]] = {}

    def formula(self, index: str, formula: str, row: int, column: int) -> str:
        """Return the formula of a cell. formula: what stands there, nothing where it is that of another cell."""
        if formula or index not in self._known:
            self._known[index] = formula[:_LONGEST], row, column
            return formula
        shared, first, left = self._known[index]

        def moved(reference: re.Match[str]) -> str:
            if not reference[2]:
                return reference[0]
            name = reference[2] if reference[1] else written(_number(reference[2]) + column - left, "A")
            number = reference[4] if reference[3] else str(int(reference[4]) + row - first)
            return f"{reference[1]}{name}{reference[3]}{number}"

        return _REFERENCE.sub(moved, shared)


def _number(letters: str) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number
