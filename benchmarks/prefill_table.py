"""Results of `ragkv bench prefill` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from benchmarks.answers import DepthRow
from benchmarks.grid import TextGrid, number, spread
from benchmarks.prefill import PrefillResult
from ragkv.evaluation.table import Row


def title(result: PrefillResult) -> str:
    """A title: what was measured, and on which machine."""
    return (
        f"{result.model} ({result.layers} layers, {result.dtype}) on {result.device}, {result.threads} threads, "
        f"torch {result.torch}: prefill, cache-ready, median of {result.repeat} runs after {result.warmup}; "
        f"dense attention by {result.backend}"
    )


def times(result: PrefillResult) -> TextGrid:
    """Times in ms; scoring, attention and rest are from the split pass; errors are relative."""
    heads: tuple[str, ...] = ("tokens", "prefill", "ms", "p90", "speedup")
    heads += ("scoring", "attention", "rest", "cells read")
    noted = any(row.note for row in result.rows)
    rows = []
    for row in result.rows:
        spans = (row.ms, row.p90)
        parts = (row.scoring, row.attention, row.rest)
        cells = [str(row.length), row.policy, *(number(span, ".1f") for span in spans)]
        cells += [number(row.ratio, ".2f"), *(number(part, ".1f") for part in parts), number(row.read, ".1%")]
        cells += [number(row.logits_error, ".2e"), number(row.hidden_error, ".2e")]
        note = (row.note,) if noted else ()
        rows.append((*cells, number(row.peak_bytes, ".1f", 2**-30), *note))
    heads += ("logits error", "hidden error", "peak GiB", *(("note",) if noted else ()))
    return TextGrid(heads, tuple(rows), words=2)


def backends(result: PrefillResult) -> list[str]:
    """A line per length: time of dense attention alone with every kernel that can run it."""
    notes = []
    for length, group in groupby(result.backends, key=lambda one: one.length):
        found = sorted(group, key=lambda one: one.ms)
        listed = ", ".join(f"{one.name} {one.ms:.1f} ms" for one in found)
        notes.append(f"dense attention of {length} tokens alone, best first: {listed}")
    return notes


def by_depth(found: Sequence[DepthRow]) -> TextGrid:
    """Exact match by depth of the answer, and of all questions of a length; numbers of questions in brackets."""
    parts = sorted({(row.low, row.high) for row in found})
    heads = ("tokens", "prefill", *(f"{low:.0%}–{high:.0%}" for low, high in parts), "EM", "F1", "cells read")
    rows = []
    for (tokens, policy), group in groupby(found, key=lambda row: (row.tokens, row.policy)):
        mine = list(group)
        at = {(row.low, row.high): f"{100 * row.em:.1f} ({row.questions})" for row in mine}
        count = sum(row.questions for row in mine)
        means = [sum(row.questions * getattr(row, name) for row in mine) / count for name in ("em", "f1", "read")]
        cells = (at.get(part, "–") for part in parts)
        rows.append((str(tokens), policy, *cells, *(number(mean, ".1f", 100) for mean in means)))
    return TextGrid(heads, tuple(rows), words=2)


def answers(found: Mapping[str, Sequence[Row]]) -> TextGrid:
    """Scores on whole sets in percent; differences in points with their 95% interval, by a paired bootstrap."""
    heads = ("questions", "prefill", "number", "EM", "F1", "Δ F1 to full (95%)", "cells read", "TTFT ms")
    rows = [
        (
            name,
            row.method,
            str(row.questions),
            number(row.em, ".1f", 100),
            number(row.f1, ".1f", 100),
            spread(row.delta, row.low, row.high),
            number(row.read, ".1f", 100),
            number(row.ttft, ".0f"),
        )
        for name, table in found.items()
        for row in table
    ]
    return TextGrid(heads, tuple(rows), words=2)
