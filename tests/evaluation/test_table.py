"""The table of the methods: means, medians, and the interval of the difference to full."""

from dataclasses import replace

import pytest

from benchmarks.plot import check_plot, plot
from ragkv.errors import InputError
from ragkv.evaluation.quality_figures import QualityFigures, QualityOutcome
from ragkv.evaluation.score import interval
from ragkv.evaluation.sets import GoldSpan, SetQuestion
from ragkv.evaluation.table import by_set, markdown, markdown_by_set, rows

ASKED = SetQuestion("?", ("x",), "one", GoldSpan(0, 0, 1))


def outcome(method, number, f1, ttft=10.0, **changes):
    figures = QualityFigures(
        float(f1 == 1), f1, 1.0, 0.1, 0.5, 0.2, 1.0, 3 * 2.0**20, ttft, 20.0, 0.4, layer_recall=0.75
    )
    return QualityOutcome(ASKED, method, "x", replace(figures, **changes), (0, number))


def test_shares_are_means_and_times_are_medians():
    (row,) = rows([outcome("reuse", n, f1, ttft) for n, (f1, ttft) in enumerate([(1.0, 1), (0.5, 2), (0.0, 99)])])
    assert (row.questions, row.em, row.f1, row.ttft) == (3, pytest.approx(1 / 3), 0.5, 2)
    assert row.delta is None, "full was not asked"


def test_the_difference_is_taken_question_by_question_whatever_their_order():
    full = [outcome("full", n, f1) for n, f1 in enumerate([1.0, 0.0, 1.0, 0.0])]
    same = [outcome("epic", n, f1) for n, f1 in enumerate([1.0, 0.0, 1.0, 0.0])][::-1]
    worse = [outcome("reuse", n, f1) for n, f1 in enumerate([0.5, 0.0, 0.5, 0.0])]
    by_method = {row.method: row for row in rows(full + same + worse)}
    assert (by_method["epic"].delta, by_method["epic"].low, by_method["epic"].high) == (0, 0, 0)
    assert by_method["reuse"].delta == -0.25
    assert -0.5 <= by_method["reuse"].low < -0.25 < by_method["reuse"].high <= 0


def test_the_gap_is_that_between_no_context_and_all_of_it():
    asked = [*(outcome(m, 0, f) for m, f in (("full", 0.8), ("no-context", 0.3), ("scout", 0.7), ("random", 0.2)))]
    assert [row.pgr for row in rows(asked)] == [pytest.approx(share) for share in (1, 0, 0.8, -0.2)]
    little = [outcome("full", 0, 0.34), outcome("no-context", 0, 0.3), outcome("scout", 0, 0.3)]
    assert {row.pgr for row in rows(little)} == {None}, "the context wins too little"
    assert {row.pgr for row in rows(asked[::2])} == {None}, "nobody asked without a context"


def test_the_interval_of_many_coin_flips_is_the_normal_one():
    low, high = interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.01)
    assert interval([0.0, 1.0] * 200) == (low, high)


def test_markdown_tells_what_was_not_measured():
    table = rows([outcome("full", 0, 1.0), outcome("scout", 0, 1.0, ttft_load=None, load=None)])
    lines = markdown(table).splitlines()
    assert len(lines) == 4
    assert (
        lines[2]
        == "| `full` | 100.0 | 100.0 | +0.0 (+0.0 … +0.0) | – | 100.0 | 75.0 | 50.0 | 20.0 | 3.0 | 40.0 | 10 | 20 |"
    )
    assert lines[3].endswith("| – | 10 | – |")


def test_recall_by_layer_is_that_of_the_outcomes_that_have_it():
    told = [outcome("scout", 0, 1.0), outcome("scout", 1, 1.0, layer_recall=0.25)]
    assert rows(told)[0].layer_recall == 0.5
    assert rows([*told, outcome("scout", 2, 1.0, layer_recall=None)])[0].layer_recall == 0.5
    assert rows([outcome("scout", 2, 1.0, layer_recall=None)])[0].layer_recall is None


def test_answers_whose_place_is_not_known_count_for_no_recall():
    found, missed = outcome("scout", 0, 1.0), outcome("scout", 1, 0.0, recall=0.0, layer_recall=0.25)
    unknown = replace(outcome("scout", 2, 1.0), question=replace(ASKED, span=None))
    (row,) = rows([found, missed, unknown])
    assert (row.questions, row.recall, row.layer_recall) == (3, 0.5, 0.5)
    assert rows([unknown])[0].recall is None, "nothing is known to be found"


def test_each_set_of_questions_has_a_table_of_its_own():
    asked = [
        outcome("full", 0, 1.0),
        replace(outcome("full", 0, 0.5), at=(1, 0)),
        replace(outcome("full", 0, 0.0), at=(2, 0)),
    ]
    text = markdown_by_set(by_set(asked, ["a", "b", "b"]))
    assert [line for line in text.splitlines() if line.startswith("##")] == ["## a: 1 questions", "## b: 2 questions"]
    assert [line.split(" | ")[2] for line in text.splitlines() if line.startswith("| `full`")] == ["100.0", "25.0"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn_and_the_same_figures_give_the_same_file(tmp_path, suffix):
    table = rows([outcome("full", 0, 1.0, 100), outcome("scout", 0, 0.9, kv=100.0)])
    for name in ("a", "b"):
        plot(table, "two methods", tmp_path / f"{name}{suffix}")
    drawn = (tmp_path / f"a{suffix}").read_bytes()
    assert drawn == (tmp_path / f"b{suffix}").read_bytes()
    assert len(drawn) > 5000
    assert b"scout" in drawn or suffix == ".png"


def test_other_plots_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        check_plot(tmp_path / "plot.pdf")
