"""The page of a quality run: every set has its table and plot, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.page import frontier, page
from ragkv.evaluation.table import by_set, rows
from tests.evaluation.test_table import outcome


def test_each_set_has_its_own_rows_and_differences() -> None:
    first = [outcome("full", 0, 1.0), outcome("scout", 0, 1.0)]
    second = [replace(outcome("full", 0, 1.0), at=(1, 0)), replace(outcome("scout", 0, 0.0), at=(1, 0))]
    tables = by_set([*first, *second], ["squad", "news"])
    assert list(tables) == ["squad", "news"]
    assert [tables[name][1].delta for name in tables] == [0.0, -1.0]


def test_the_frontier_is_what_nothing_beats_in_time_and_f1() -> None:
    asked = [("full", 0.9, 100.0), ("scout", 0.9, 10.0), ("reuse", 0.8, 20.0), ("random", 0.1, 5.0)]
    table = rows([outcome(method, 0, f1, ttft) for method, f1, ttft in asked])
    assert [row.method for row in frontier(table)] == ["random", "scout"]


def test_a_page_stands_alone_and_shows_every_method() -> None:
    table = rows([outcome("full", 0, 0.9, 100.0), outcome("scout:cap=0.1<b>", 0, 0.8, 10.0)])
    text = page("Two & more", {"squad <2>": table, "other": table})
    assert text.count("<svg") == text.count("<table>") == 2
    assert "scout:cap=0.1&lt;b&gt;" in text
    assert "<b>" not in text
    assert "squad &lt;2&gt;" in text
    assert not re.search(r"https?://|<script|src=", text)
    assert text.count("<circle") == 4
