"""Simulated and calibrated figures as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.grid import TextGrid, number
from benchmarks.scale import ScaleResult
from benchmarks.scale_calibrate import PredictedFigure


@dataclass(frozen=True)
class ScaleRow:
    """A load on a cluster under one policy.

    Attributes:
        replicas: Number of replicas.
        result: What became of the load.
    """

    replicas: int
    result: ScaleResult


def figures(row: ScaleRow) -> dict[str, Any]:
    """Return the figures of a row: shares of 1, seconds, and bytes a second."""
    result = row.result
    chunks = max(1, result.host + result.stored + result.encoded)
    answered = result.answered > 0
    return {
        "replicas": row.replicas,
        "policy": result.policy,
        "asked": result.asked,
        "answered": result.answered,
        "refused": result.refused,
        "spilled": result.spilled / result.asked,
        "host": result.host / chunks,
        "store": result.stored / chunks,
        "encoded": result.encoded / chunks,
        "ttft_p50": result.percentile(50) if answered else None,
        "ttft_p99": result.percentile(99) if answered else None,
        "answers_a_second": result.answered / result.seconds if answered else 0.0,
        "received_bytes_a_second": result.received / result.seconds if answered else 0.0,
        "sent_bytes_a_second": result.sent / result.seconds if answered else 0.0,
        "busy_mean": statistics.fmean(result.busy),
        "busy_most": max(result.busy),
    }


def scale_grid(rows: Sequence[ScaleRow]) -> TextGrid:
    """Shares in percent, times in milliseconds, GB/s of 10^9 bytes."""
    heads = ("policy", "replicas", "answers/s", "refused %", "spilled %", "host %", "store %", "encoded %")
    cells = []
    for row in rows:
        each = figures(row)
        cells.append(
            (
                *(each["policy"], str(row.replicas), number(each["answers_a_second"], ".1f")),
                number(each["refused"] / each["asked"], ".1f", 100),
                *(number(each[name], ".1f", 100) for name in ("spilled", "host", "store", "encoded")),
                *(number(each[name], ".0f", 1000) for name in ("ttft_p50", "ttft_p99")),
                number(each["received_bytes_a_second"] + each["sent_bytes_a_second"], ".1f", 1e-9),
                *(number(each[name], ".0f", 100) for name in ("busy_mean", "busy_most")),
            )
        )
    return TextGrid((*heads, "TTFT p50", "p99", "GB/s", "busy %", "most"), tuple(cells))


def comparison_grid(rows: Sequence[PredictedFigure]) -> TextGrid:
    """What was measured beside what was predicted."""
    cells = [(r.name, f"{r.measured:.3f}", f"{r.predicted:.3f}", f"{100 * r.error:+.0f}") for r in rows]
    return TextGrid(("", "measured", "predicted", "difference %"), tuple(cells))
