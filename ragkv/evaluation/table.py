"""Outcomes as a table: a row per method with means over the questions and the difference to full prefill."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ragkv.engine.registry import FULL
from ragkv.evaluation.quality import NO_CONTEXT
from ragkv.evaluation.quality_figures import QualityOutcome
from ragkv.evaluation.score import interval

LEAST_GAP = 0.05
"""F1 that the whole context must win over none, so that a share of it means something."""


@dataclass(frozen=True)
class Row:
    """One method over questions: means, and medians of the times (ms). Names not listed are as in QualityFigures.

    Attributes:
        delta: F1 minus that of full on the same questions; None if full was not asked, like `low` and `high`.
        low: lower end of the 95% interval of `delta`, by a paired bootstrap.
        high: upper end.
        load: None without a store, like `ttft_load`.
        read: None for methods that reuse stored KV.
        recall: over the questions whose answer's place is known; None if no place is.
        layer_recall: likewise; None if no outcome has it.
        pgr: performance gap recovered: the share that the method wins of what full wins over no context; None unless
            both were asked and the gap is at least LEAST_GAP.
    """

    method: str
    questions: int
    em: float
    f1: float
    delta: float | None
    low: float | None
    high: float | None
    recall: float | None
    middle: float
    sequence: float
    recompute: float
    load: float | None
    stopped: float
    kv: float
    ttft: float
    ttft_load: float | None
    read: float | None
    pgr: float | None = None
    layer_recall: float | None = None


def rows(outcomes: Sequence[QualityOutcome]) -> list[Row]:
    """Return a row for every method, in the order in which they were asked."""
    by_method: dict[str, list[QualityOutcome]] = {}
    for outcome in outcomes:
        by_method.setdefault(outcome.method, []).append(outcome)
    full = {outcome.at: outcome.figures.f1 for outcome in by_method.get(FULL, ())}
    found = [_row(method, answered, full) for method, answered in by_method.items()]
    f1 = {row.method: row.f1 for row in found}
    none, gap = f1.get(NO_CONTEXT, 0.0), f1.get(FULL, 0.0) - f1.get(NO_CONTEXT, 1.0)
    return found if gap < LEAST_GAP else [replace(row, pgr=(row.f1 - none) / gap) for row in found]


def by_set(outcomes: Sequence[QualityOutcome], names: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows of each set of questions; names: of the set that each context belongs to, in their order."""
    groups: dict[str, list[QualityOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(names[outcome.at[0]], []).append(outcome)
    return {name: rows(group) for name, group in groups.items()}


def heads() -> tuple[str, ...]:
    """Return the heads of the columns."""
    return (
        "method", "EM", "F1", "Δ F1 to full (95%)", "PGR", "recall", "by layer", "sequence", "recompute", "KV MiB",
        "load", "TTFT ms", "with load",
    )  # fmt: skip


def markdown(table: Sequence[Row]) -> str:
    """The table in Markdown; shares and F1 in percent."""
    lines = (heads(), ("---", *["---:"] * (len(heads()) - 1)), *map(cells, table))
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- |", "|---|").replace(" ---: |", "---:|")
    )


def markdown_by_set(tables: Mapping[str, Sequence[Row]]) -> str:
    """Return a headed table of each set, by its name."""
    return "\n".join(
        f"## {name}: {table[0].questions} questions\n\n{markdown(table)}" for name, table in tables.items()
    )


def _row(method: str, answered: Sequence[QualityOutcome], full: dict[tuple[int, int], float]) -> Row:
    figures = [outcome.figures for outcome in answered]
    known = [outcome.figures for outcome in answered if outcome.question.span is not None]
    names = ("em", "f1", "middle", "sequence", "recompute", "stopped", "kv")
    means = {name: statistics.fmean(getattr(f, name) for f in figures) for name in names}
    loads = [f.load for f in figures if f.load is not None]
    times = [f.ttft_load for f in figures if f.ttft_load is not None]
    by_layer = [f.layer_recall for f in known if f.layer_recall is not None]
    read = [f.read for f in figures if f.read is not None]
    differences = [outcome.figures.f1 - full[outcome.at] for outcome in answered if outcome.at in full]
    low, high = interval(differences) if differences else (None, None)
    return Row(
        method=method,
        questions=len(figures),
        recall=statistics.fmean(f.recall for f in known) if known else None,
        delta=statistics.fmean(differences) if differences else None,
        low=low,
        high=high,
        load=statistics.fmean(loads) if loads else None,
        ttft=statistics.median(f.ttft for f in figures),
        ttft_load=statistics.median(times) if times else None,
        read=statistics.fmean(read) if read else None,
        layer_recall=statistics.fmean(by_layer) if by_layer else None,
        **means,
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row as text."""

    def percent(value: float | None, sign: str = "") -> str:
        return "–" if value is None else f"{100 * value:{sign}.1f}"

    delta = (
        "–" if row.low is None else f"{percent(row.delta, '+')} ({percent(row.low, '+')} … {percent(row.high, '+')})"
    )
    return (
        f"`{row.method}`",
        percent(row.em),
        percent(row.f1),
        delta,
        percent(row.pgr),
        *(percent(value) for value in (row.recall, row.layer_recall, row.sequence, row.recompute)),
        f"{row.kv / 2**20:.1f}",
        percent(row.load),
        f"{row.ttft:.0f}",
        "–" if row.ttft_load is None else f"{row.ttft_load:.0f}",
    )
