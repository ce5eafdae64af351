"""The promise of the whole pipeline, measured in one run: first token against full recompute, warm store on disk."""

import json

import pytest

from ragkv.bench.ttft import TIMED, TtftParams, ttft
from ragkv.cli import run
from ragkv.config import load_settings


@pytest.mark.timeout(600)
def test_the_first_token_comes_three_times_sooner_than_by_full_recompute(tmp_path):
    result = ttft(load_settings(data=tmp_path), TtftParams(repeat=1, methods=("full", "scout")), lambda *_: None)
    scout = result.rows[1]
    print(result)
    assert 3_700 <= result.context <= 4_096
    assert scout.speedup >= 3
    assert scout.speedup_without_retrieval >= 3


@pytest.mark.timeout(300)
def test_the_command_shows_its_figures_writes_them_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "ttft", "--chunks", "2", "--chunk-tokens", "128", "--repeat", "1", "--json", "ttft.json"]
    assert run(arguments) == 0
    figures = json.loads((tmp_path / "ttft.json").read_text())
    assert [row["method"] for row in figures["rows"]] == list(TIMED)
    assert figures["rows"][0]["speedup"] == 1.0
    assert "scout" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["ttft.json"]
