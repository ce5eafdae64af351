"""Answers over one collection of all passages: retrieval is real, and ways are compared on the same questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.retrieved import RetrievedParams, RetrievedRow, ask_collection, read_collection
from ragkv.cli import run
from ragkv.config import load_settings
from ragkv.engine.engine import Engine
from ragkv.errors import InputError
from tests.start_records import with_records

TOWNS = ("Harth", "Solvey", "Brindle", "Ketter", "Ashmoor", "Velby", "Norrick", "Tamsel")


def line(town: str, others: tuple[str, ...]) -> str:
    texts = [f"The mill of {each} was built by a cooper. It stands near the river." for each in others]
    texts.append(f"The harbour of {town} was built in 18{TOWNS.index(town) + 10}. It has two piers.")
    context = "\n".join(f"Passage {n}:\nNotes\n{text}" for n, text in enumerate(texts, 1))
    answer = f"18{TOWNS.index(town) + 10}"
    return json.dumps({"input": f"When was the harbour of {town} built?", "context": context, "answers": [answer]})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("set") / "towns.jsonl"
    path.write_text("\n".join(line(town, TOWNS[:4]) for town in TOWNS[:3]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def rows(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], RetrievedRow]:
    settings = load_settings(data=with_records(tmp_path_factory.mktemp("data")), model="models/tiny", store="disk")
    params = RetrievedParams(("scout", "full"), (1, 5), questions=2, max_tokens=6)
    told: list[tuple[str, int, int]] = []
    with Engine.open(settings) as engine:
        found = ask_collection(engine, *read_collection([file]), params, lambda *done: told.append(done))
    assert told[-1] == ("ask", 2, 2)
    return {(row.method, row.top_k): row for row in found}


def test_passages_of_all_contexts_are_documents_once(file: Path) -> None:
    documents, questions = read_collection([file, file])
    assert [document.id for document in documents] == [f"passage-{n}" for n in range(4 + 3)]
    assert len(questions) == 6


def test_every_method_is_asked_with_every_number_of_chunks(rows: dict[tuple[str, int], RetrievedRow]) -> None:
    assert list(rows) == [("scout", 1), ("scout", 5), ("full", 1), ("full", 5)]
    assert all(len(row.answers) == 2 and 0 < row.without_retrieval < row.ttft for row in rows.values())
    assert rows["full", 5].kept == rows["full", 5].context > rows["full", 1].context
    assert rows["scout", 5].kept < rows["scout", 5].context


def test_the_answer_is_found_in_the_collection_and_more_chunks_find_no_less(
    rows: dict[tuple[str, int], RetrievedRow],
) -> None:
    assert rows["scout", 5].found == 1.0
    assert rows["scout", 1].found <= rows["scout", 5].found


def test_rows_are_compared_with_the_first_row_and_times_with_the_first_number(
    rows: dict[tuple[str, int], RetrievedRow],
) -> None:
    first = rows["scout", 1]
    assert (first.delta, first.low, first.high, first.ttft_ratio) == (0, 0, 0, 1)
    assert rows["full", 5].delta == pytest.approx(rows["full", 5].f1 - first.f1)
    assert rows["full", 1].ttft_ratio == 1
    assert rows["full", 5].ttft_ratio != 1


def test_a_number_of_chunks_that_does_not_fit_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.jsonl"
    words = " ".join(f"The barn {n} is red." for n in range(150))
    path.write_text(json.dumps({"input": "Which colour has barn 7?", "context": words, "answers": ["red"]}))
    settings = load_settings(data=with_records(tmp_path / "data"), model="models/tiny", store="disk")
    with Engine.open(settings) as engine:
        documents, questions = read_collection([path])
        monkeypatch.setattr(engine.model, "max_positions", 900)
        found = ask_collection(engine, documents, questions, RetrievedParams(("scout",), (1, 64)), lambda *_: None)
        assert [row.top_k for row in found] == [1]


def test_an_unknown_method_is_refused_before_anything_is_ingested(file: Path, tmp_path: Path) -> None:
    with Engine.open(load_settings(data=with_records(tmp_path), model="models/tiny", store="disk")) as engine:
        with pytest.raises(InputError, match="scoot"):
            ask_collection(engine, *read_collection([file]), RetrievedParams(("scoot",)), lambda *_: None)
        assert engine.catalog.documents() == []


def test_the_command_prints_and_writes_a_row_for_every_way(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["bench", "retrieval", "--longbench", str(file), "--top-k", "1", "--top-k", "2", "--method", "reuse"]
    asked += ["--questions", "1", "--model", str(Path("models/tiny").resolve())]
    monkeypatch.chdir(tmp_path)
    assert run([*asked, "--json", "rows.json", "--table", "table.md"]) == 0
    assert [row["top_k"] for row in json.loads(Path("rows.json").read_text())] == [1, 2]
    assert "1 questions about a collection of 7 passages" in capsys.readouterr().out
    assert "| reuse | 2 |" in Path("table.md").read_text()
