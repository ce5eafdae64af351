"""A table of cells: aligned text for the terminal, Markdown for documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MISSING = "–"


@dataclass(frozen=True)
class TextGrid:
    """Cells of a table.

    Attributes:
        heads: one per column.
        rows: rows of as many cells.
        words: number of columns, from the left, that hold words; the others hold numbers and are right-aligned.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def aligned(grid: TextGrid) -> list[str]:
    """The table as lines of text, the heads first."""
    lines = (grid.heads, *grid.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(grid.heads))]
    return [
        "  ".join(
            f"{cell:<{width}}" if column < grid.words else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def markdown(grid: TextGrid) -> str:
    """The table in Markdown."""
    rule = ["---" if column < grid.words else "---:" for column in range(len(grid.heads))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (grid.heads, rule, *grid.rows))


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """`value` times `scale` in a format; a dash for None."""
    return MISSING if value is None else f"{value * scale:{form}}"


def spread(middle: float | None, low: float | None, high: float | None) -> str:
    """A difference in percentage points with its interval."""
    if middle is None or low is None or high is None:
        return MISSING
    return f"{100 * middle:+.1f} ({100 * low:+.1f} … {100 * high:+.1f})"


def titled(title: str, grid: TextGrid, notes: Sequence[str] = ()) -> str:
    """A table in Markdown with a title above and notes below."""
    below = "".join(f"\n- {note}" for note in notes)
    return f"{title}\n\n{markdown(grid)}{below}\n" if below else f"{title}\n\n{markdown(grid)}"
