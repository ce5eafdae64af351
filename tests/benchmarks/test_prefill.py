"""Whole prefills, dense and sparse: rows, rows without figures, and the command."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.answers import NeedleParams, compare, depth, needles_by_depth, prose
from benchmarks.grid import TextGrid, aligned, markdown
from benchmarks.plot import plot_prefill
from benchmarks.prefill import OUT_OF_MEMORY, Input, PrefillParams, apart, measure
from benchmarks.prefill_table import answers, backends, by_depth, times, title
from benchmarks.shapes import random_model
from ragkv.cli import run
from ragkv.errors import InputError
from ragkv.evaluation.sets import needle_sets
from ragkv.sparse.critiprefill import CritiPrefill
from tests.test_architecture import BLOCKED_IMPORT, SERVICE

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = CritiPrefill(segment=32, block=8, budget=32, threshold=64)
SPEC = "critiprefill:segment=32,block=8,budget=32,threshold=64"


@pytest.fixture(scope="module")
def tiny():
    return random_model("tiny")


@pytest.fixture(scope="module")
def result(tiny):
    policies = (("some", SMALL), ("every", replace(SMALL, budget=1024)))
    return measure(tiny, PrefillParams((64, 512), policies, repeat=2), lambda *_: None)


def test_every_policy_has_a_row_at_every_length(result):
    assert [(row.length, row.policy) for row in result.rows] == [
        (length, name) for length in (64, 512) for name in ("dense", "some", "every")
    ]
    assert (result.layers, result.dtype, result.device, result.repeat) == (4, "float32", "cpu", 2)


def test_rows_are_whole_and_say_what_was_read(result):
    dense, some, every = result.rows[3:]
    for row in (dense, some, every):
        assert row.note == ""
        assert 0 < row.ms <= row.p90
        assert row.attention > 0
        assert row.rest > 0
        assert row.peak_bytes is None, "there is no device memory here"
    assert (dense.ratio, dense.scoring, dense.read, dense.logits_error, dense.hidden_error) == (1, 0, 1, 0, 0)
    assert some.ratio == pytest.approx(dense.ms / some.ms)
    assert some.scoring > 0
    assert some.read < 0.9
    assert 1e-3 < some.hidden_error < 1
    assert 1e-3 < some.logits_error < 1


def test_a_budget_of_all_keys_makes_no_error(result):
    every = result.rows[5]
    assert every.hidden_error < 1e-5
    assert every.logits_error < 1e-5


def test_a_policy_that_does_not_apply_says_so(result):
    dense, some, every = result.rows[:3]
    assert dense.ms > 0
    assert (some.ms, some.ratio, some.read) == (None, None, None)
    assert some.note == every.note == "does not apply at this length"


def test_what_does_not_fit_into_memory_is_said_and_the_others_go_on(tiny, monkeypatch):
    class Greedy:
        def why_dense(self, rows, keys):
            return ""

        def start(self):
            raise torch.OutOfMemoryError("no room")

    params = PrefillParams((256,), (("greedy", Greedy()), ("some", SMALL)), repeat=1)
    _, greedy, some = measure(tiny, params, lambda *_: None).rows
    assert (greedy.note, greedy.ms) == (OUT_OF_MEMORY, None)
    assert some.ratio > 0


def test_lengths_and_kernels_that_there_are_not_are_refused_before_anything_runs(tiny):
    with pytest.raises(InputError, match="reads 2 to 131072 tokens"):
        measure(tiny, PrefillParams((131073,), ()), lambda *_: None)
    with pytest.raises(InputError, match="choose one of flash, cudnn"):
        measure(tiny, PrefillParams((64,), (), backend="magic"), lambda *_: None)


def test_the_kernels_of_dense_attention_are_timed_alone(result):
    assert [(each.length, each.name) for each in result.backends] == [(64, "flash"), (512, "flash")]
    assert all(each.ms > 0 for each in result.backends)
    assert backends(result)[1].startswith("dense attention of 512 tokens alone, best first: flash ")


def test_a_run_again_gives_the_same_and_does_not_grow_the_cache(tiny):
    given = Input(tiny, list(range(2, 514)))
    first = given.split(SMALL)
    given.run(None)
    again = given.split(SMALL)
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(first.hidden, again.hidden)
    assert first.read == again.read < 1


def test_errors_are_relative_and_means_over_rows():
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert apart(exact, exact) == 0
    assert apart(exact * torch.tensor([[1.1], [1.3]]), exact) == pytest.approx(0.2)


def test_tables_show_every_row_and_a_note_only_where_there_is_one(result):
    grid = times(result)
    assert grid.heads[-1] == "note"
    assert grid.rows[1][:4] == ("64", "some", "–", "–")
    assert grid.rows[1][-1] == "does not apply at this length"
    assert times(replace(result, rows=result.rows[3:])).heads[-1] == "peak GiB"
    assert "cache-ready, median of 2 runs" in title(result)
    small = TextGrid(("a", "b"), (("x", "1"), ("long", "10")))
    assert aligned(small) == ["a      b", "x      1", "long  10"]
    assert markdown(small) == "| a | b |\n| --- | ---: |\n| x | 1 |\n| long | 10 |\n"


def test_speedups_are_drawn(result, tmp_path):
    plot_prefill(result, "tiny", tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 5000


def test_depth_is_a_share_of_the_whole_context(model):
    (asked,) = needle_sets(1, 2, 120, 4, 5, lambda text: len(model.prompt.plain(text)))
    whole = "".join(title + text for title, text in asked.chunks)
    for question in asked.questions:
        assert depth(asked, question) == pytest.approx(whole.index(question.gold[0]) / len(whole), abs=0.02)


def test_needles_are_asked_by_depth_under_every_policy(model):
    params = NeedleParams(lengths=(512,), bins=2, sets=1, questions=2, max_tokens=12)
    policies = [("sparse", SMALL), ("everything", replace(SMALL, budget=8192))]
    found = needles_by_depth(model, policies, params, lambda *_: None)
    by_policy = {name: [row for row in found if row.policy == name] for name in ("full", "sparse", "everything")}
    assert {sum(row.questions for row in rows) for rows in by_policy.values()} == {2}
    assert all(0 <= row.low < row.high <= 1 for row in found)
    full, sparse, everything = by_policy.values()
    assert [row.f1 for row in full] == [row.f1 for row in everything]
    assert all(row.read == 1 for row in full)
    assert all(row.read < 0.9 for row in sparse)
    grid = by_depth(found)
    assert [row[1] for row in grid.rows] == ["full", "sparse", "everything"]


def test_whole_sets_are_compared_with_dense_prefill(model):
    sets = {"two": needle_sets(1, 2, 120, 2, 5, lambda text: len(model.prompt.plain(text)))}
    policies = [("sparse", SMALL), ("everything", replace(SMALL, budget=8192))]
    found = compare(model, sets, policies, lambda *_: None)
    full, sparse, everything = found["two"]
    assert (full.method, sparse.method, everything.method) == ("full", "sparse", "everything")
    assert (full.read, everything.delta) == (1, 0)
    assert sparse.read < 1
    assert sparse.low <= sparse.delta <= sparse.high
    grid = answers(found)
    assert [row[:3] for row in grid.rows] == [("two", name, "2") for name in ("full", "sparse", "everything")]
    assert grid.rows[0][5] == "+0.0 (+0.0 … +0.0)"


def test_prose_fills_any_length_and_starts_with_the_prefix(model):
    tokens = prose(model, 700)
    assert len(tokens) == 700
    assert tuple(tokens[: len(model.prompt.prefix)]) == tuple(model.prompt.prefix)


def test_the_command_measures_a_shape_and_writes_what_it_found(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "prefill", "--shape", "tiny", "--layers", "2", "--length", "256", "--repeat", "1"]
    assert run([*asked, "--policy", SPEC, "--json", "rows.json", "--table", "table.md", "--plot", "plot.png"]) == 0
    figures = json.loads((tmp_path / "rows.json").read_text())["times"]
    assert [row["policy"] for row in figures["rows"]] == ["dense", SPEC]
    assert figures["layers"] == 2
    assert SPEC in capsys.readouterr().out
    assert f"| 256 | {SPEC} |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert run(["bench", "prefill", "--shape", "tiny", "--needles"]) == 2
    assert "answer no questions" in capsys.readouterr().err
    assert run(["bench", "prefill", "--shape", "huge"]) == 1


def test_a_shape_is_measured_without_the_service_libraries(root, tmp_path):
    file = tmp_path / "rows.json"
    # Called, not through the command line: typer itself may bring pydantic in.
    call = (
        "import pathlib\nfrom benchmarks.commands.prefill import prefill\n"
        f"prefill(pathlib.Path(sys.argv[3]), [256], [{SPEC!r}], 'tiny', repeat=1)\n"
    )
    command = [sys.executable, "-c", BLOCKED_IMPORT + call, ",".join(SERVICE), "ragkv.cli", str(file)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(file.read_text())["times"]["rows"]) == 2
