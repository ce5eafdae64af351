"""Questions over several paragraphs, as training contexts: what a question needs is there, or its answer is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ragkv.evaluation.questions import UNKNOWN
from ragkv.tune.contexts import Chunk
from tools.adapter.asked_by_people import word_runs
from tools.adapter.asked_over_paragraphs import HopParams, HopSource, read_hops

TOWNS = ("Amber", "Birch", "Cobalt", "Dunlin", "Ember", "Fallow")


def hotpot(town: str) -> dict[str, Any]:
    about = f" {town} lies on the river that the engineer of {town} crossed with a bridge of nine stone arches."
    built = [f"The engineer of {town} was called {town}son.", f" {town}son was born far away from {town}."]
    return {
        "question": f"Who built the bridge of nine stone arches at {town}?",
        "answer": f"{town}son",
        "supporting_facts": [[town, 0], [f"Engineer of {town}", 0]],
        "context": [
            [f"Mill of {town}", [f"The mill of {town} grinds the corn of the farms near {town} and of no others."]],
            [town, [f"{town} is a town.", about]],
            [f"Engineer of {town}", built],
        ],
    }


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """As the hub's `datasets` writes a row."""
    facts, context = row["supporting_facts"], row["context"]
    return row | {
        "supporting_facts": {"title": [title for title, _ in facts], "sent_id": [number for _, number in facts]},
        "context": {"title": [title for title, _ in context], "sentences": [sentences for _, sentences in context]},
    }


def musique(row: dict[str, Any]) -> dict[str, Any]:
    needed = {title for title, _ in row["supporting_facts"]}
    paragraphs = [
        {"title": title, "paragraph_text": "".join(sentences), "is_supporting": title in needed}
        for title, sentences in row["context"]
    ]
    return {"question": row["question"], "answer": row["answer"], "paragraphs": paragraphs}


def words(chunk: Chunk) -> int:
    return len(chunk[1].split())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hops.json"
    path.write_text(json.dumps([hotpot(town) for town in TOWNS]), encoding="utf-8")
    return path


@pytest.mark.parametrize("form", [dict, columns, musique])
def test_all_forms_of_a_file_give_the_same_questions(file: Path, tmp_path: Path, form: Any) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(form(hotpot(town))) for town in TOWNS), encoding="utf-8")
    found = read_hops(lines)
    assert found == read_hops(file)
    assert [title for title, _ in found[0].needed] == ["Amber", "Engineer of Amber"]
    assert [title for title, _ in found[0].others] == ["Mill of Amber"]
    assert "town. Amber lies" in found[0].needed[0][1]


def test_a_context_holds_all_that_its_questions_need_and_what_it_lacks_is_unknown(file: Path) -> None:
    source, seen = HopSource(read_hops(file), words, HopParams(unknown=0.4)), set()
    for seed in range(40):
        found = source.context(Random(seed), 260)
        assert found == source.context(Random(seed), 260)
        assert sum(map(words, found.chunks)) + 32 * sum(each.chunk >= 0 for each in found.asked) <= 260
        titles = [title for title, _ in found.chunks]
        assert len(set(titles)) == len(titles)
        for asked in found.asked:
            town = asked.text.rstrip("?").split()[-1]
            at = [titles.index(title) for title in (town, f"Engineer of {town}") if title in titles]
            seen.add(asked.answer == UNKNOWN)
            assert asked.answer in ((UNKNOWN,) if not at else (f"{town}son",))
            assert asked.chunk == (max(at) if at else -1), "a row that ends before this chunk leaves the question out"
    assert seen == {True, False}


def test_questions_that_need_a_measured_paragraph_are_left_out_and_so_are_other_measured_paragraphs(file: Path) -> None:
    everything = read_hops(file)
    needed = frozenset(word_runs(everything[0].needed[0][1]))
    assert [each.question for each in read_hops(file, needed)] == [each.question for each in everything[1:]]
    other = frozenset(word_runs(everything[0].others[0][1]))
    found = read_hops(file, other)
    assert [each.question for each in found] == [each.question for each in everything]
    assert [len(each.others) for each in found] == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "somebody else"},
        {"answer": " ".join(["son"] * 17)},
        {"supporting_facts": [["Amber", 0]]},
        {"question": "Who?"},
    ],
    ids=["not told", "long", "one paragraph", "asks nothing"],
)
def test_questions_that_cannot_be_learned_from_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([hotpot("Amber") | change, hotpot("Birch") | {"answer": "yes"}]), encoding="utf-8")
    assert [each.answer for each in read_hops(path)] == ["yes"]
