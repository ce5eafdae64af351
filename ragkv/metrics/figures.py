"""The figures that the overview of the dashboard, `ragkv top` and Grafana show: the same names, in the same order.

What was saved is what a user notices: how much sooner first tokens came than by a full prefill, and what that time
costs. The price of an hour of the machine is told on the overview; without one there is no money.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ragkv.metrics.sums import MetricSums
from ragkv.types import HourPrice

NONE = "–"
Form = Literal["seconds", "share", "count", "money"]


@dataclass(frozen=True)
class MetricFigure:
    """A figure over a span of time.

    Attributes:
        name: What it is called everywhere.
        says: What it means, for people who have not read about the methods.
        of: Computes it; None where there is nothing yet. `money` is the seconds that are paid for.
        form: How it is written.
    """

    name: str
    says: str
    of: Callable[[MetricSums], float | None]
    form: Form


FIGURES = (
    MetricFigure(
        "First token, median",
        "Half of the questions got the first word of their answer within this time.",
        lambda sums: sums.seconds["ttft"].quantile(0.5),
        "seconds",
    ),
    MetricFigure(
        "First token, 95%",
        "All but one question in twenty got the first word of their answer within this time.",
        lambda sums: sums.seconds["ttft"].quantile(0.95),
        "seconds",
    ),
    MetricFigure(
        "Full prefill, estimated",
        "What the first word would have taken on average were the chunks read as text, by the speed of this machine.",
        lambda sums: sums.full,
        "seconds",
    ),
    MetricFigure(
        "Time saved",
        "How much sooner all first words came than by a full prefill, added up. Ingest is not subtracted.",
        lambda sums: sums.saved_seconds,
        "seconds",
    ),
    MetricFigure(
        "Money saved",
        "The time saved, at the price of an hour of this machine. The overview asks for the price.",
        lambda sums: sums.saved_seconds,
        "money",
    ),
    MetricFigure("Answers", "Questions that were answered.", lambda sums: float(sums.answered), "count"),
    MetricFigure(
        "Cache hits",
        "Retrieved chunks whose KV was found in the cache or the store, so that it was not computed again.",
        lambda sums: sums.cache_hit,
        "share",
    ),
    MetricFigure(
        "Recomputed",
        "Tokens of the retrieved chunks that the model computed again, to connect chunk with chunk.",
        lambda sums: sums.recompute,
        "share",
    ),
    MetricFigure(
        "Kept",
        "Tokens of the retrieved chunks whose KV the model read. The method left out the others as not needed.",
        lambda sums: sums.sequence,
        "share",
    ),
    MetricFigure(
        "Loaded",
        "Bytes of stored KV that were read, of those that the whole chunks would have taken.",
        lambda sums: sums.load,
        "share",
    ),
)


def shown(figure: MetricFigure, sums: MetricSums, price: HourPrice | None) -> str:
    """Return a figure as text.

    Args:
        figure: The figure.
        sums: Sums over the span.
        price: Of an hour of the machine; None if it is not known.
    """
    value = figure.of(sums)
    if value is None:
        return NONE
    if figure.form == "money":
        return NONE if price is None else f"{price.of(value):,.2f} {price.currency}".rstrip()
    if figure.form == "seconds":
        return duration(value)
    return percent(value) if figure.form == "share" else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Format a share: 0.1234 → 12.3%"""
    return NONE if share is None else f"{100 * share:.1f}%"


def duration(seconds: float | None) -> str:
    """Format seconds: 0.162 → 162 ms, 754 → 12.6 min"""
    if seconds is None:
        return NONE
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
