"""`ragkv tune` as a user runs it, on a model of two layers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.program import ragkv
from tests.tune.tiny_folder import passages, tiny_folder


def tune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"RAGKV_MODEL": str(folder / "model"), "RAGKV_DEVICE": "cpu", "RAGKV_DATA": str(folder)}
    return ragkv("tune", *arguments, cwd=folder, **settings)


def documents(folder: Path) -> Path:
    texts = folder / "docs"
    texts.mkdir()
    for number, passage in enumerate(passages(24)):
        (texts / f"{number}.txt").write_text(passage.text, encoding="utf-8")
    return texts


def test_documents_become_an_adapter_and_a_table(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "model")
    documents(tmp_path)
    small = ("--steps", "2", "--length", "256", "--rank", "4", "--workers", "0")
    done = tune(tmp_path, "docs", "--out", "adapter", *small, "--contexts", "1", "--gold")
    assert done.returncode == 0, done.stderr
    assert "| before | `full` |" in done.stdout
    assert "| after | `scout:repair=none` |" in done.stdout
    assert "RAGKV_ADAPTER=adapter" in done.stdout
    report = json.loads((tmp_path / "adapter" / "report.json").read_text())
    assert (report["steps"], report["options"]["teacher"]) == (2, "self")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    # The same command has nothing left to do but to measure.
    again = tune(tmp_path, "docs", "--out", "adapter", *small, "--contexts", "0", "--gold")
    assert again.returncode == 0, again.stderr
    assert "going on from" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--out", "adapter"), "nowhere"),
        (("docs/0.txt", "--out", "adapter"), "two documents"),
        (("docs", "--out", "adapter", "--questions", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    tiny_folder(tmp_path / "model")
    documents(tmp_path)
    done = tune(tmp_path, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_wrapper_tokens_are_tuned_for_a_collection(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "model")
    documents(tmp_path)
    small = ("--steps", "2", "--length", "256", "--workers", "0", "--contexts", "0")
    done = tune(tmp_path, "docs", "--out", "wrapper", "--kind", "wrapper", *small)
    assert done.returncode == 0, done.stderr
    assert "RAGKV_ADAPTER=COLLECTION=wrapper" in done.stdout
    assert (tmp_path / "wrapper" / "wrapper.safetensors").stat().st_size < 100_000
