"""Formats numbers as text, the same everywhere on the page."""

from __future__ import annotations

NONE = "–"


def percent(share: float | None) -> str:
    """Format a share: 0.1234 → 12.3%"""
    return NONE if share is None else f"{100 * share:.1f}%"


def size(count: float) -> str:
    """Format bytes: 1536 → 1.5 KiB"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Format seconds: 0.162 → 162 ms"""
    if seconds is None:
        return NONE
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def count(number: float) -> str:
    """Format a number: 12345.6 → 12,346"""
    return f"{number:,.0f}"


def quantity(number: float, name: str) -> str:
    """Format a number of things: 1, "chunk" → 1 chunk; 12345 → 12,345 chunks"""
    return f"{count(number)} {name}" if number == 1 else f"{count(number)} {name}s"
