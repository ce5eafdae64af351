"""Plots of measurements as .png or .svg files.

plot          as SamKV's Figure 1: F1 over time to first token; the area of a circle is the kept KV
plot_prefill  speedup of each prefill policy over dense prefill, by length of the input
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragkv.bench.prefill import DENSE, PrefillResult
from ragkv.bench.table import Row
from ragkv.errors import ConfigError, InputError

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


def check_plot(path: Path) -> None:
    """Raise what `plot` raises, before anything is measured."""
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: a plot is a {' or '.join(FORMATS)} file")
    try:
        import matplotlib  # noqa: F401  # checks only whether it is installed
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'ragkv[plot]'") from None
