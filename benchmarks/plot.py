"""Plots of measurements as .png or .svg files.

plot          as SamKV's Figure 1: F1 over time to first token; the area of a circle is the kept KV
plot_prefill  speedup of each prefill policy over dense prefill, by length of the input
plot_serve    distributions of the time to first token and between tokens under load, for each method
plot_scale    distributions of the time to first token of a simulated cluster, and chunks in host memory, by policy
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.prefill import DENSE, PrefillResult
from ragkv.errors import ConfigError, InputError
from ragkv.evaluation.table import Row

if TYPE_CHECKING:  # questions are asked where the client's packages are not installed
    from benchmarks.scale_table import ScaleRow
    from benchmarks.serve import LoadResult

FORMATS = (".png", ".svg")
LARGEST = 1600  # area of the largest circle, square points


def plot(table: Sequence[Row], title: str, path: Path) -> None:
    """Draw a table into a .png or .svg file. Raises InputError for another suffix, ConfigError without matplotlib."""
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "ragkv", "font.size": 9}):  # the same figures give the same file
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(
            xscale="log", xlabel="time to first token, cache-ready, ms", ylabel="F1, %", title=title
        )
        largest = max(row.kv for row in table)
        for row in table:
            at = row.ttft, 100 * row.f1
            axes.scatter(*at, s=max(12.0, LARGEST * row.kv / largest), alpha=0.45)
            axes.annotate(row.method, at, textcoords="offset points", xytext=(0, -3), ha="center")
        axes.margins(0.15)
        axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def plot_prefill(result: PrefillResult, title: str, path: Path) -> None:
    """Draw speedups into a .png or .svg file. Raises as `plot` does."""
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "ragkv", "font.size": 9}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="tokens", ylabel="time of dense prefill over time", title=title)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        for name in dict.fromkeys(row.policy for row in result.rows if row.policy != DENSE):
            points = [(r.length, r.ratio) for r in result.rows if r.policy == name and r.ratio is not None]
            axes.plot([length for length, _ in points], [ratio for _, ratio in points], marker="o", label=name)
        lengths = sorted({row.length for row in result.rows})
        axes.set_xticks(lengths, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def plot_serve(results: Sequence[LoadResult], limit: float | None, title: str, path: Path) -> None:
    """Draw distributions of times into a .png or .svg file. Raises as `plot` does.

    Args:
        results: One for each method.
        limit: Largest time to first token, in seconds, that counts as goodput; None draws no line.
        title: Title of the figure.
        path: The file.
    """
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "ragkv", "font.size": 9}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title)
        first, between = figure.subplots(1, 2, sharey=True)
        for result in results:
            answered = [each for each in result.answers if each.report is not None]
            gaps = [late - early for each in answered for early, late in pairwise(each.tokens)]
            for axes, times in ((first, [each.ttft for each in answered]), (between, gaps)):
                if times:
                    axes.ecdf([1000 * each for each in times], label=result.method)
        if limit is not None:
            first.axvline(1000 * limit, color="black", linewidth=0.8)
        for axes, name in ((first, "time to first token, ms"), (between, "time between tokens, ms")):
            axes.set_xscale("log")
            axes.set_xlabel(name)
            axes.grid(alpha=0.3)
        first.set_ylabel("share of questions, or of gaps between tokens")
        first.legend()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def plot_scale(rows: Sequence[ScaleRow], title: str, path: Path) -> None:
    """Draw the times of the largest cluster, and the tiers of all, into a .png or .svg file. Raises as `plot` does."""
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "ragkv", "font.size": 9}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=8)
        times, tiers = figure.subplots(1, 2)
        largest = max(row.replicas for row in rows)
        for policy in dict.fromkeys(row.result.policy for row in rows):
            own = [row for row in rows if row.result.policy == policy]
            ttft = next(row.result.ttft for row in own if row.replicas == largest)
            points = [1000 * float(np.percentile(ttft, percent)) for percent in range(1, 100)]
            times.plot(points, range(1, 100), label=policy)
            chunks = [row.result.host + row.result.stored + row.result.encoded for row in own]
            shares = [100 * row.result.host / count for row, count in zip(own, chunks, strict=True)]
            tiers.plot([row.replicas for row in own], shares, marker="o", label=policy)
        times.set(xscale="log", xlabel="time to first token, ms", ylabel=f"answers of {largest} replicas, %")
        tiers.set(xscale="log", xlabel="replicas", ylabel="chunks found in host memory, %")
        tiers.set_ylim(bottom=0)
        times.grid(alpha=0.3)
        tiers.grid(alpha=0.3)
        times.legend()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def check_plot(path: Path) -> None:
    """Raise what `plot` raises, before anything is measured."""
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: a plot is a {' or '.join(FORMATS)} file")
    try:
        import matplotlib  # noqa: F401  # checks only whether it is installed
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'matplotlib>=3.10,<4'") from None
