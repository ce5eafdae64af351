"""The promise of the whole pipeline, measured in one run: first token against full recompute, warm store on disk."""

import itertools
import json

import pytest

from benchmarks.ttft import TIMED, TtftParams, ttft
from ragkv.cli import run
from ragkv.config import load_settings


@pytest.mark.timeout(600)
def test_the_first_token_comes_three_times_sooner_than_by_full_recompute(tmp_path):
    result = ttft(
        load_settings(data=tmp_path), TtftParams(chunks=5, repeat=1, methods=("full", "scout")), lambda *_: None
    )
    scout = result.rows[1]
    print(result)
    assert 2_300 <= result.context <= 2_560
    assert scout.speedup >= 3
    assert scout.speedup_without_retrieval >= 3


@pytest.mark.timeout(600)
def test_the_command_shows_its_figures_writes_them_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "ttft", "--chunks", "2", "--chunk-tokens", "128", "--repeat", "1", "--json", "ttft.json"]
    arguments += ["--prefill", "dense", "--prefill", "auto"]
    assert run(arguments) == 0
    rows = json.loads((tmp_path / "ttft.json").read_text())["rows"]
    assert [(row["method"], row["prefill"]) for row in rows] == list(itertools.product(TIMED, ("dense", "auto")))
    assert (rows[0]["speedup"], rows[0]["policy_speedup"]) == (1.0, 1.0)
    for dense, auto in zip(rows[::2], rows[1::2], strict=True):
        assert auto["policy_speedup"] == pytest.approx(dense["ttft"] / auto["ttft"]), "there is one question"
    assert "scout" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["ttft.json"]
