"""Figures of measured answers: means, paired differences, and the plot over what was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.adapter.measure import figures, plot_kept


def row(method: str, at: int, f1: float, answer: str = "Ada", **more: Any) -> dict[str, Any]:
    means = {"em": f1, "f1": f1, "recall": 1.0, "sequence": 1.0, "recompute": 0.0, "kind": "one"}
    return {
        "set": "lamps",
        "at": (at, 0),
        "method": method,
        "q": "Who?",
        "a": ["Ada"],
        "answer": answer,
        **means,
        **more,
    }


ROWS = [
    row("full", 0, 1.0),
    row("full", 1, 0.5),
    row("scout:cap=0.1", 0, 1.0, sequence=0.1),
    row("scout:cap=0.1", 1, 0.0, "unknown", sequence=0.1),
    row("no-context", 0, 0.0, "unknown", sequence=0.0),
]


def test_a_method_is_compared_with_full_on_the_same_questions() -> None:
    scout = next(line for line in figures(ROWS) if "scout" in line)
    assert "n    2 EM 0.500 F1 0.500 d -0.250" in scout
    assert "seq 0.10" in scout
    assert "false-unknown 0.500" in scout
    assert "one 0.500" in scout


def test_the_plot_names_every_method_of_the_sets_asked_without_context(tmp_path: Path) -> None:
    out = tmp_path / "kept.svg"
    other = [{**row("epic", 0, 1.0), "set": "never asked without context"}]
    plot_kept(ROWS + other, out)
    drawn = out.read_text()
    assert all(f">{name}</text>" in drawn for name in ("lamps", "full", "scout (literal)", "no-context"))
    assert "epic" not in drawn
    assert drawn == (plot_kept(ROWS + other, out), out.read_text())[1], "the same figures give the same file"
