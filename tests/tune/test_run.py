"""`tune` from texts to a folder that the engine loads, with a report of before and after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ragkv.engine.calibration import NeedleSetParams
from ragkv.errors import InputError, ModelUnsupported
from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.decoder import DecoderModel
from ragkv.model.source import ModelSource
from ragkv.tune import run as run_module
from ragkv.tune.contexts import TextPassage
from ragkv.tune.given import GivenQuestion
from ragkv.tune.report import METHODS, Measured, ReportRow, loss, needs_repair
from ragkv.tune.run import TuneRun, split_documents, tune
from tests.tune.test_training import OPTIONS
from tests.tune.tiny_folder import passages, tiny_folder

CALIBRATION = NeedleSetParams(sets=1, documents=3, questions=4, tokens=80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def test_it_writes_an_adapter_a_profile_and_a_report(folder: Path, tmp_path: Path) -> None:
    run = TuneRun(
        ModelSource(str(folder)),
        tmp_path / "adapter",
        replace(OPTIONS, steps=2),
        device="cpu",
        report_contexts=1,
        report_tokens=256,
        calibration=CALIBRATION,
    )
    given = [GivenQuestion("Who built the harbour of Tarn?"), GivenQuestion("Where was Mira Stone born?", "Skerrow")]
    said: list[str] = []
    done = tune(run, passages(24), given, said.append, lambda *far: None)
    assert [line for line in said if not line.startswith("step")] == ["measuring before", "training", "measuring after"]
    report = json.loads((run.out / "report.json").read_text())
    rows = [(row["when"], row["method"]) for row in report["answers"]]
    assert rows == [(when, method) for when in ("before", "after") for method in METHODS]
    full = next(row for row in report["answers"] if row["method"] == "full")
    assert full["agreement"] == 1.0
    unrepaired = [row for row in report["answers"] if row["method"] == "scout:repair=none"]
    assert [row["recompute"] for row in unrepaired] == [0.0, 0.0]
    assert "| after | `scout:repair=none` |" in done.report
    config = json.loads((run.out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == folder.name
    loaded = DecoderModel.load(ModelSource(str(folder), str(run.out)), "cpu")
    profile = json.loads((run.out / "profile.json").read_text())
    assert loaded.profile.scout_repair == profile["scout_repair"]
    assert [list(pair) for pair in loaded.profile.retrieval_heads] == profile["retrieval_heads"]
    assert loaded.weights_hash != DecoderModel.load(str(folder), "cpu").weights_hash


def test_without_a_report_it_trains_and_calibrates(folder: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=2)
    run = TuneRun(ModelSource(str(folder)), tmp_path, options, device="cpu", report_contexts=0, calibration=CALIBRATION)
    done = tune(run, passages(24), (), lambda line: None, lambda *far: None)
    assert done.report == ""
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "profile.json").read_text())["scout_repair"] == "kept"
    assert not (tmp_path / "report.json").exists()


def test_held_out_documents_without_questions_give_no_report(folder: Path, tmp_path: Path) -> None:
    run = TuneRun(
        ModelSource(str(folder)),
        tmp_path,
        replace(OPTIONS, steps=1),
        device="cpu",
        report_contexts=1,
        calibration=CALIBRATION,
    )
    said: list[str] = []
    silent = TextPassage("towns", "zz", "Numbers", "1 2 3. 4 5 6. 7 8 9.")
    done = tune(run, [*passages(2), silent], (), said.append, lambda *far: None)
    assert "no report: the rules find no questions in the held-out documents" in said
    assert done.report == ""
    assert (tmp_path / "profile.json").is_file()


def test_whole_documents_are_held_out() -> None:
    training, held = split_documents(passages(60))
    assert {each.document for each in held} == {"town9", "town19", "town29"}
    assert not {each.document for each in held} & {each.document for each in training}
    few_training, few_held = split_documents(passages(6))
    assert ({each.document for each in few_held}, len(few_training)) == ({"town2"}, 4)
    with pytest.raises(InputError, match="two documents"):
        split_documents([TextPassage("", "one", "", "Only one document.")])


@pytest.mark.parametrize(("unrepaired", "needed"), [(0.80, False), (0.795, False), (0.78, True)])
def test_a_profile_asks_for_repair_where_answers_need_it(unrepaired: float, needed: bool) -> None:
    scores = {"full": 0.82, "reuse": 0.7, "scout:repair=kept": 0.80, "scout:repair=none": unrepaired}
    rows = tuple(ReportRow("after", name, 10, f1, f1, 0.0, 0.0, 0.0, f1, 1.0, 0.0, 1.0) for name, f1 in scores.items())
    assert needs_repair(Measured(rows, {}, {})) is needed


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("full", -0.2, "full answers worse than before: -20.0 points of F1 (-20.0 … -20.0)"),
        ("reuse", -0.2, "reuse answers worse"),
        ("scout:repair=none", -0.2, "scout:repair=none answers worse"),
        ("scout:repair=kept", -0.2, ""),
        ("reuse", 0.2, ""),
    ],
)
def test_what_is_surely_worse_is_refused(method: str, change: float, words: str) -> None:
    scores = {name: {(0, number): 0.5 for number in range(9)} for name in METHODS}
    after = {**scores, method: dict.fromkeys(scores[method], 0.5 + change)}
    assert loss(Measured((), {}, scores), Measured((), {}, after)).startswith(words)
    assert bool(words) == bool(loss(Measured((), {}, scores), Measured((), {}, after)))


def test_what_may_be_chance_is_not_refused() -> None:
    before = {name: {(0, number): 0.5 for number in range(9)} for name in METHODS}
    after = {name: {**each, (0, 0): 0.0} for name, each in before.items()}
    assert loss(Measured((), {}, before), Measured((), {}, after)) == ""


def test_a_worse_adapter_is_not_left_in_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "loss", lambda before, after: "full answers worse")
    options = replace(OPTIONS, steps=1, kind="wrapper")
    run = TuneRun(
        ModelSource(str(folder)),
        tmp_path,
        options,
        "cpu",
        report_contexts=1,
        report_tokens=256,
        calibration=CALIBRATION,
    )
    done = tune(run, passages(24), (), lambda line: None, lambda *far: None)
    assert done.refused == "full answers worse"
    assert not (tmp_path / "wrapper.safetensors").exists()
    assert not (tmp_path / "profile.json").exists()
    assert (tmp_path / "report.md").read_text() == done.report


def test_wrapper_tokens_are_tuned_on_top_of_a_lora_adapter(folder: Path, tmp_path: Path) -> None:
    lora = TuneRun(
        ModelSource(str(folder)), tmp_path / "lora", OPTIONS, "cpu", report_contexts=0, calibration=CALIBRATION
    )
    tune(lora, passages(24), (), lambda line: None, lambda *far: None)
    both = ModelSource(str(folder), str(tmp_path / "lora"))
    options = replace(OPTIONS, steps=2, kind="wrapper", front=2, back=1)
    run = TuneRun(both, tmp_path / "wrapper", options, "cpu", report_contexts=0, calibration=CALIBRATION)
    tune(run, passages(24), (), lambda line: None, lambda *far: None)
    model = DecoderModel.load(replace(both, wrappers=(("", str(tmp_path / "wrapper")),)), "cpu")
    assert model.prompt.wrapper is not None
    assert model.weights_hash == DecoderModel.load(both, "cpu").weights_hash
    with pytest.raises(ModelUnsupported, match="trained for other weights"):
        DecoderModel.load(ModelSource(str(folder), wrappers=(("", str(tmp_path / "wrapper")),)), "cpu")


def test_a_lora_adapter_on_other_weights_is_told(folder: Path, tmp_path: Path) -> None:
    run = TuneRun(
        ModelSource(str(folder)), tmp_path / "lora", OPTIONS, "cpu", report_contexts=0, calibration=CALIBRATION
    )
    tune(run, passages(24), (), lambda line: None, lambda *far: None)
    said: list[str] = []
    load_checkpoint(ModelSource(str(folder), str(run.out)), "cpu", "float32", None, notify=said.append)
    assert said == []
    other = tiny_folder(tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (other / "config.json").write_text(json.dumps(config))
    load_checkpoint(ModelSource(str(other), str(run.out)), "cpu", "float32", None, notify=said.append)
    assert [line for line in said if "was trained on other weights" in line] == said != []
