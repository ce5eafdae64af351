"""`ragkv bench quality --html`: one page with a table and a frontier plot for each question set. It needs no network.

The plot shows F1 over the time to the first token, one point a method. The line is the frontier: no method is both
quicker and better than one on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ragkv.evaluation.table import Row, cells, heads

WIDTH, HEIGHT, MARGIN = 640, 320, 56
"""Pixels of a plot, and of what is around its area."""

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;"
    "background:#fff}table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.25rem .6rem;"
    "border-bottom:1px solid #ccc;text-align:right}th:first-child,td:first-child{text-align:left}"
    ".wide{overflow-x:auto}svg{max-width:100%;height:auto}text{font:12px system-ui,sans-serif}"
)


def page(title: str, tables: Mapping[str, Sequence[Row]]) -> str:
    """Return the page; tables: the rows of each set, by its name."""
    parts = [_section(name, table) for name, table in tables.items()]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    notes = (
        "<p>Shares and F1 in percent, times in milliseconds. PGR: the share of what the full context wins over no "
        "context that a method wins too. Intervals: 95%, paired bootstrap.</p>"
    )
    body = f"<h1>{escape(title)}</h1>{notes}{''.join(parts)}"
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def frontier(table: Sequence[Row]) -> list[Row]:
    """Return the rows that no other row beats in both time and F1, the quickest first."""
    found = list[Row]()
    for row in sorted(table, key=lambda row: (row.ttft, -row.f1)):
        if not found or row.f1 > found[-1].f1:
            found.append(row)
    return found


def _section(name: str, table: Sequence[Row]) -> str:
    lines = [_line("th", heads()), *(_line("td", cells(row)) for row in table)]
    return f'<h2>{escape(name)}</h2>{_plot(table)}<div class="wide"><table>{"".join(lines)}</table></div>'


def _line(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text.strip('`'))}</{tag}>" for text in texts) + "</tr>"


def _plot(table: Sequence[Row]) -> str:
    """Draw F1 over the logarithm of the time."""
    times = [math.log10(max(row.ttft, 1e-3)) for row in table]
    low, high = math.floor(min(times)), max(math.ceil(max(times)), math.floor(min(times)) + 1)

    def place(row: Row) -> tuple[float, float]:
        right = (math.log10(max(row.ttft, 1e-3)) - low) / (high - low)
        return MARGIN + right * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - row.f1 * (HEIGHT - 2 * MARGIN)

    drawn = [
        _text(MARGIN + (WIDTH - 2 * MARGIN) * (at - low) / (high - low), HEIGHT - MARGIN + 18, f"{10.0**at:g} ms")
        for at in range(low, high + 1)
    ]
    for share in (0, 25, 50, 75, 100):
        y = HEIGHT - MARGIN - share / 100 * (HEIGHT - 2 * MARGIN)
        drawn.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        drawn.append(_text(MARGIN - 22, y + 4, f"{share}"))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, frontier(table)))
    drawn.append(f'<polyline points="{points}" fill="none" stroke="#0072b2"/>')
    for row in table:
        x, y = place(row)
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#0072b2" fill-opacity="0.6"/>')
        drawn.append(_text(x, y - 9, row.method))
    label = "F1 in percent over the time to the first token"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
