"""Encoding beside prefill, on random weights: figures that agree, without the libraries of the service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.encode import EncodeParams, encode_shape
from benchmarks.shapes import random_model
from ragkv.cli import run
from ragkv.errors import InputError
from tests.test_architecture import BLOCKED_IMPORT, SERVICE


def test_the_figures_are_those_of_the_same_chunks() -> None:
    found = encode_shape(random_model("tiny", "cpu"), EncodeParams(50, 160, repeat=2), lambda *_: None)
    assert found.chunks == 3
    assert found.over_prefill == pytest.approx(found.encode / found.prefill)
    assert found.encoded_share == pytest.approx(found.encoded / found.batched)
    assert found.packed_share == pytest.approx(found.packed / found.batched)


def test_a_chunk_larger_than_a_group_is_measured_alone() -> None:
    found = encode_shape(random_model("tiny", "cpu"), EncodeParams(90, 60, repeat=1), lambda *_: None)
    assert (found.chunks, found.tokens) == (1, 90)


def test_chunks_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit"):
        encode_shape(random_model("tiny", "cpu"), EncodeParams(10**6), lambda *_: None)


def test_the_command_prints_and_writes_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    options = ["--tokens", "40", "--repeat", "1", "--device", "cpu", "--json", str(file)]
    assert run(["bench", "ingest", "--shape", "tiny", *options]) == 0
    assert "times the prefill" in capsys.readouterr().out
    assert json.loads(file.read_text())["tokens"] == 40


def test_a_gpu_machine_without_the_service_can_measure(root: Path) -> None:
    call = (
        "from benchmarks.encode import EncodeParams, encode_shape\n"
        "from benchmarks.shapes import random_model\n"
        "print(encode_shape(random_model('tiny', 'cpu', layers=2), EncodeParams(40, repeat=1), lambda *_: None))\n"
    )
    command = [sys.executable, "-c", BLOCKED_IMPORT + call, ",".join(SERVICE), "benchmarks.encode"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "over_prefill" in done.stdout
