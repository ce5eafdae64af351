"""Formats numbers as text, the same everywhere on the page."""

from __future__ import annotations

from ragkv.metrics.figures import NONE as NONE
from ragkv.metrics.figures import duration as duration
from ragkv.metrics.figures import percent as percent


def size(count: float) -> str:
    """Format bytes: 1536 → 1.5 KiB"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count(number: float) -> str:
    """Format a number: 12345.6 → 12,346"""
    return f"{number:,.0f}"


def quantity(number: float, name: str) -> str:
    """Format a number of things: 1, "chunk" → 1 chunk; 12345 → 12,345 chunks"""
    return f"{count(number)} {name}" if number == 1 else f"{count(number)} {name}s"
