"""Scout keeps its promise on generated questions over 8 chunks, 4k tokens of context; `make soak` asks 100."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from benchmarks.record import RunRecord
from benchmarks.stored import disk
from ragkv.cli import run
from ragkv.engine.passes import run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.errors import InputError
from ragkv.evaluation.evidence import set_evidence
from ragkv.evaluation.quality import QualityParams, ask_all
from ragkv.evaluation.sets import QuestionSet, SetQuestion, needle_sets
from ragkv.evaluation.table import rows
from ragkv.retrieval import make_embedder
from ragkv.timing import StepTimer


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "questions"), [(1, 12), pytest.param(4, 25, marks=pytest.mark.soak)])
def test_scout_finds_the_answer_with_a_tenth_of_the_blocks(model, count, questions):
    tokens = model.profile.chunk_tokens - 32
    sets = needle_sets(count, 8, tokens, questions, 1, lambda text: len(model.prompt.plain(text)))
    params = QualityParams(evidence=set_evidence(model, make_embedder("")))
    outcomes = ask_all(model, sets, ("full", "samkv-fusion", "scout"), lambda *_: None, params)
    by_method = {row.method: row for row in rows(outcomes)}
    full, literal, scout = (by_method[name] for name in ("full", "samkv-fusion", "scout"))
    assert scout.questions == questions * count
    assert scout.middle <= 0.10
    assert scout.recall >= 0.95
    assert scout.em >= full.em - 0.05
    assert scout.sequence < 0.25
    assert literal.sequence < full.sequence  # the literal method's figures stand beside it, with no promise on recall


@pytest.fixture(scope="module")
def small(model):
    return needle_sets(2, 2, 120, 2, 5, lambda text: len(model.prompt.plain(text)))


METHODS = ("full", "reuse", "multi-infllm", "epic:link=4", "scout")


def test_the_store_is_read_as_it_is_in_service(model, small):
    with disk(model) as store:
        outcomes = ask_all(model, small, METHODS, lambda *_: None, QualityParams(store=store))
    by_method = {row.method: row for row in rows(outcomes)}
    assert list(by_method) == list(METHODS)
    assert by_method["full"].load == 0
    assert by_method["scout"].load < by_method["reuse"].load < 1.2
    assert by_method["reuse"].load == by_method["multi-infllm"].load, "InfLLM may ask for any block"
    assert all(o.figures.ttft_load >= o.figures.ttft > 0 for o in outcomes if o.method == "full")
    without = ask_all(model, small, ("full", "scout"), lambda *_: None)
    assert {row.load for row in rows(without)} == {None}


def test_a_chunk_that_scout_leaves_out_is_counted_and_changes_no_answer(model, small):
    asked, question = next((each, q) for each in small for q in each.questions if q.span.chunk == 1)
    moved = replace(question, span=replace(question.span, chunk=0))
    alone = replace(asked, chunks=asked.chunks[1:], questions=(moved,))
    params = QualityParams(evidence=set_evidence(model, make_embedder("")))
    (screened,) = ask_all(model, [replace(asked, questions=(question,))], ("scout:chunks=1",), lambda *_: None, params)
    (expected,) = ask_all(model, [alone], ("scout",), lambda *_: None, params)
    first, second = (len(model.prompt.chunk(*chunk)) for chunk in asked.chunks)
    assert (screened.answer, screened.figures.recall) == (expected.answer, 1)
    assert screened.figures.sequence == pytest.approx(expected.figures.sequence * second / (first + second))


def test_no_context_is_the_question_behind_the_prefix_alone(model, small):
    (question, *_) = small[0].questions
    prefiller = Prefiller(model, model.prompt.prefix)
    tokens = model.prompt.question(question.text)
    expected = prefiller.prefill_full((), tokens, StepTimer(model.device)).logits
    (outcome,) = ask_all(model, [replace(small[0], questions=(question,))], ("no-context",), lambda *_: None)
    first = model.prompt.answer(outcome.answer)[:1]
    assert outcome.answer
    assert not first or int(expected.argmax()) == first[0]
    figures = outcome.figures
    assert (figures.sequence, figures.recompute, figures.kv, figures.recall) == (0, 0, 0, 0)


def test_the_command_reads_quantised_bodies_if_asked_to(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "quality", "--sets", "1", "--chunks", "2", "--questions", "1", "--max-tokens", "2"]
    asked += ["--method", "reuse", "--out", "run.jsonl"]
    assert run([*asked, "--body", "int8", "--json", "rows.json"]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert 35 * 128 / (32 * 512) < row["load"] < 0.35, "all blocks, and the heads"
    assert "int8 bodies" in capsys.readouterr().out
    assert run(asked) == 1
    assert "body" in capsys.readouterr().err


def test_the_numbers_in_memory_are_those_that_the_store_gives_back(model):
    kv = Prefiller(model, model.prompt.prefix).encode(range(300, 340))
    with disk(model, "fp8") as store:
        kept = store.put(kv)
        rows_of = run_alone(model, store.open(kv, exact=False).load([(0, 2)] * model.shape.layers))
    for layer, (k, v) in enumerate(rows_of):
        tokens = [*range(16), *range(32, 40)]
        assert torch.equal(k, kept.k[layer, tokens])
        assert torch.equal(v, kept.v[layer, tokens])
    assert not torch.equal(kept.v, kv.v)


def test_a_run_that_was_broken_off_goes_on_where_it_stopped(model, small, tmp_path):
    path = tmp_path / "run.jsonl"
    params = QualityParams(keep=RunRecord(path, model, small, 24).keep)
    whole = ask_all(model, small, ("full", "epic"), lambda *_: None, params)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(whole) == 9
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])  # killed while it wrote the fifth line
    record = RunRecord(path, model, small, 24)
    assert len(record.done) == 3
    fresh = []
    params = QualityParams(done=record.done, keep=lambda o: (record.keep(o), fresh.append(o)))
    again = ask_all(model, small, ("full", "epic"), lambda *_: None, params)
    assert len(fresh) == 5
    assert [(o.at, o.method, o.answer) for o in again] == [(o.at, o.method, o.answer) for o in whole]
    assert [replace(o.figures, ttft=0) for o in again] == [replace(o.figures, ttft=0) for o in whole]
    assert len(RunRecord(path, model, small, 24).done) == 8


def test_the_record_of_another_run_is_refused(model, small, tmp_path):
    path = tmp_path / "run.jsonl"
    RunRecord(path, model, small, 24)
    with pytest.raises(InputError, match="holds a run with another"):
        RunRecord(path, model, small[:1], 24)
    with pytest.raises(InputError, match="holds a run with another"):
        RunRecord(path, model, small, 25)
    with path.open("a") as file:
        file.write('{"at": [9, 9]}\n')
    with pytest.raises(InputError, match=r"run.jsonl:2: is no outcome"):
        RunRecord(path, model, small, 24)


def test_a_context_that_the_model_cannot_read_is_told_before_anything_is_asked(model):
    long = QuestionSet((("Title", "word " * 9000),), (SetQuestion("Who?", ("me",), ""),), "file.jsonl:3")
    with pytest.raises(InputError, match=r"file.jsonl:3: \d+ tokens .* reads 8192.*--fit"):
        ask_all(model, [long], ("full",), lambda *_: None)


def of_2048_tokens(tiny_folder, folder):
    """The small model with a quarter of its positions, so that a context that is too long is soon read."""
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@pytest.mark.timeout(600)
def test_the_command_runs_a_longbench_file_and_writes_what_it_found(tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGKV_MODEL", str(of_2048_tokens(tiny_folder, tmp_path / "model")))
    context = "".join(
        f"Passage {n}:\nHouse {n}\nThe house number {n} belongs to {who}. " + "It has a door. " * 225 + "\n\n"
        for n, who in enumerate(("Ada Miller", "Bert Stone", "Cleo Hart"), 1)
    )
    line = {"input": "Who owns house number 1?", "context": context, "answers": ["Ada Miller", "Miller"]}
    (tmp_path / "houses.jsonl").write_text(json.dumps(line) + "\n")
    arguments = ["bench", "quality", "--longbench", "houses.jsonl", "--method", "full", "--method", "scout:cap=0.05"]
    assert run(arguments) == 1
    assert "houses.jsonl:1" in capsys.readouterr().err
    files = [
        "--json",
        "rows.json",
        "--out",
        "run.jsonl",
        "--table",
        "table.md",
        "--plot",
        "plot.svg",
        "--html",
        "page.html",
    ]
    assert run([*arguments, "--fit", *files]) == 0
    shown = capsys.readouterr()
    assert "1 LongBench questions" in shown.out
    assert "1 of 1 contexts were too long" in shown.err
    assert [row["method"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["full", "scout:cap=0.05"]
    assert "`scout:cap=0.05`" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.svg").stat().st_size > 5000
    assert "<h2>houses</h2>" in (tmp_path / "page.html").read_text()
    first = (tmp_path / "rows.json").read_text()
    assert run([*arguments, "--fit", *files]) == 0
    assert (tmp_path / "rows.json").read_text() == first, "everything was in run.jsonl"


@pytest.mark.parametrize("prefix", ["shared", "isolated"])
def test_chunks_may_be_encoded_without_the_prefix_and_then_the_first_is_recomputed_too(model, small, prefix):
    full, blend = (
        ask_all(model, small, (name,), lambda *_: None, QualityParams(prefix=prefix))
        for name in ("full", "cacheblend:ratio=1")
    )
    assert [o.answer for o in full] == [o.answer for o in blend]
    assert all((o.figures.recompute == 1) == (prefix == "isolated") for o in blend)
