"""What needs no model is checked before one is loaded, which takes seconds or minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ragkv.cli import run

COMMANDS = ("ask Who?", "ingest a.txt", "demo", "reindex", "calibrate", "tune a.txt b.txt --out new", "serve")


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with two texts and questions about them, in which no command may load a model."""
    for name in ("ragkv.model.decoder.DecoderModel.load", "ragkv.model.checkpoint.load_checkpoint"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGKV_DATA", str(tmp_path / "data"))
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"The harbour of Tarn {name} was built in 1889 by Ada Brook.")
    for count in (1, 20):
        lines = [json.dumps({"q": "Who built it?", "a": ["Ada Brook"]})] * count
        (tmp_path / f"{count}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tune nowhere --out new", "nowhere"),
        ("tune a.txt --out new", "two documents"),
        ("tune a.txt b.txt --out a.txt", "a.txt is no folder"),
        ("tune a.txt b.txt --out new --questions missing.jsonl", "missing.jsonl: No such file"),
        ("calibrate --documents nowhere", "no text in these documents"),
        ("calibrate --confidence missing.jsonl", "missing.jsonl: No such file"),
        ("calibrate --confidence 1.jsonl", "a fit needs 20 answers at least"),
        ("calibrate --confidence 20.jsonl", "collection 'default' in data has no documents"),
        ("calibrate --confidence 20.jsonl -c x --unanswerable y", "has no documents"),
        ("reindex", "data has no documents; add some with `ragkv ingest`"),
        ("reindex --data nowhere", "nowhere has no documents"),
        ("ask Who?", "collection 'default' in data has no documents"),
        ("ask Who? --schema missing.json", "missing.json: No such file"),
    ],
)
def test_a_wrong_folder_a_missing_file_and_too_little_are_told_at_once(
    command: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_DATA", "data")
    assert run(command.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("model", "message"),
    [("/nowhere/model", "model folder '/nowhere/model' does not exist"), ("model.gguf", "there is no file model.gguf")],
)
def test_a_model_that_is_not_there_is_told_before_anything_heavy_is_imported(
    command: str, model: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_MODEL", model)
    for module in ("ragkv.cli.ask", "ragkv.cli.documents"):  # they would be told first
        monkeypatch.setattr(import_module(module), "check_documents", lambda *_: None)
    monkeypatch.setattr("ragkv.engine.engine.Engine.open", lambda *_, **__: pytest.fail("the engine was opened"))
    monkeypatch.setattr("ragkv.api.app.serve", lambda *_: pytest.fail("the service was started"))
    assert run(command.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot", "--table"])
def test_a_file_of_figures_in_no_folder_is_told_before_anything_is_measured(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "quality", option, "nowhere/figures.png"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


def test_a_method_that_holds_no_conversation_is_told_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("ragkv.cli.ask"), "check_documents", lambda *_: None)
    assert run("ask Who? --conversation x --method multi-infllm".split()) == 2
    monkeypatch.setenv("RAGKV_METHOD", "multi-infllm")
    assert run("ask Who? --conversation x".split()) == 2
    assert capsys.readouterr().err.count("answers single questions only") == 2


def test_an_adapter_that_is_not_there_is_told_as_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune a.txt b.txt --out new --adapter nothing".split()) == 2
    assert "adapter folder 'nothing' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("METHOD", "nonsense"),
        ("PREFILL", "nonsense"),
        ("DECODE", "psa:nonsense=1"),
        ("INGEST_PREFILL", "nonsense"),
    ],
)
def test_a_setting_that_names_nothing_is_told_at_once(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RAGKV_{name}", value)
    assert run(["ingest", "a.txt"]) == 2
    assert f"RAGKV_{name}" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "taken"), [("ask --help", False), ("ls --help", True)])
def test_an_answer_ends_without_taking_the_interpreter_down_and_still_does_what_was_put_off(
    command: str, taken: bool
) -> None:
    program = (
        "import atexit, os, sys; from ragkv.cli import main\n"
        "class Last:\n    def __del__(self, write=os.write): write(1, b'taken down')\n"
        "sys.last = Last(); atexit.register(print, 'put off')\n"
        f"sys.argv = ['ragkv', *{command.split()!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout
    assert "put off" in done.stdout
    assert ("taken down" in done.stdout) == taken
