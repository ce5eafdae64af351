"""How often a search finds the passage with the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recall import RecallRow, Splitting, measure_recall, recall_grid
from benchmarks.retrieved import read_collection
from ragkv.cli import run
from ragkv.errors import InputError
from tests.benchmarks.test_retrieved import TOWNS, line
from tests.ingest.reader import WordEmbedder, WordPrompt


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "towns.jsonl"
    path.write_text("\n".join(line(town, TOWNS[:4]) for town in TOWNS[:3]), encoding="utf-8")
    return path


def test_what_is_found_by_words_by_vectors_and_by_both(file: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    rows = measure_recall(
        tmp_path,
        WordEmbedder(dimension=256),
        Splitting(WordPrompt(), 64),
        read_collection([file]),
        (1, 7),
        lambda *done: told.append(done),
    )
    assert rows == [RecallRow(1, 1.0, 1.0, 1.0), RecallRow(7, 1.0, 1.0, 1.0)]
    assert told[-1] == ("search", 3, 3)
    assert recall_grid(rows).rows[0] == ("1", "100.0", "100.0", "100.0")


def test_a_question_whose_passage_is_not_found_counts_as_missed(file: Path, tmp_path: Path) -> None:
    lines = [json.loads(each) for each in file.read_text().splitlines()]
    lines[0] = {**lines[0], "input": "xyzzy plugh?", "answers": ["no such year"]}
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = measure_recall(
        tmp_path, WordEmbedder(), Splitting(WordPrompt(), 64), read_collection([file]), (3,), lambda *_: None
    )
    assert rows[0].words == pytest.approx(2 / 3)
    assert rows[0].both <= 2 / 3
    with pytest.raises(InputError, match="no questions"):
        measure_recall(tmp_path, WordEmbedder(), Splitting(WordPrompt(), 64), ([], []), (1,), lambda *_: None)


def test_the_command_prints_and_writes_the_shares(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = ["bench", "retrieval", "--longbench", str(file), "--search", "--top-k", "2", "--json", str(out)]
    assert run(command) == 0
    assert "all-MiniLM-L6-v2: 3 questions about a collection of 7 passages" in capsys.readouterr().out
    made = json.loads(out.read_text())
    assert (made["embedder"], made["rows"][0]["top_k"]) == ("all-MiniLM-L6-v2", 2)
