"""Questions that people asked, as training contexts: answers are where they are said to be, dev articles stay out."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ragkv.evaluation.questions import UNKNOWN
from tools.adapter.asked_by_people import (
    PeopleSource,
    content_words,
    is_held_out,
    measured_runs,
    read_articles,
    tells,
)

RIVERS = ("Amber", "Birch", "Cobalt", "Dunlin", "Ember", "Fallow", "Garnet", "Heron")


def article(name: str) -> dict[str, Any]:
    paragraphs = []
    for river in RIVERS:
        text = f"The {river} river of {name} rises near the {river} hills. Its length is {len(river) * 31} kilometres."
        length = f"{len(river) * 31} kilometres"
        given = [{"text": length, "answer_start": text.index(length)}] * 2
        given.append({"text": "Its length", "answer_start": text.index("Its length")})
        question = f"How long is the {river} river, which rises near the {river} hills?"
        paragraphs.append({"context": text, "qas": [{"question": question, "answers": given}]})
    return {"title": name.replace(" ", "_"), "paragraphs": paragraphs}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "asked.json"
    path.write_text(json.dumps({"data": [article("North %C3%84lia"), article("South Alia")]}), encoding="utf-8")
    return path


def test_answers_are_those_that_most_people_gave_and_titles_are_readable(file: Path) -> None:
    found = read_articles(file)
    assert {each.article for each in found} == {"North Älia", "South Alia"}
    assert [each.asked[0][1] for each in found[:2]] == ["155 kilometres", "155 kilometres"]


def test_a_context_holds_the_answers_and_what_is_elsewhere_is_unknown(file: Path) -> None:
    source = PeopleSource(read_articles(file), lambda chunk: len(chunk[1].split()))
    kinds = set()
    for seed in range(30):
        found = source.context(Random(seed), 150)
        assert found == source.context(Random(seed), 150)
        for asked in found.asked:
            kinds.add(asked.answer == UNKNOWN)
            if asked.answer == UNKNOWN:
                river = next(name for name in RIVERS if name in asked.text)
                assert f"{len(river) * 31} kilometres" not in " ".join(text for _, text in found.chunks)
            else:
                assert asked.answer in found.chunks[asked.chunk][1]
    assert kinds == {True, False}


def test_a_question_that_fits_two_chunks_alike_is_not_asked() -> None:
    words = [content_words("The toaster was returned, it broke."), content_words("The toaster was returned, too late.")]
    assert not tells("Why was the toaster returned?", 0, words)
    assert tells("Why was the toaster returned when it broke?", 0, words)
    assert not tells("Why was the toaster returned when it broke?", 1, words)


def test_long_paragraphs_are_split_and_questions_stay_with_their_answers(tmp_path: Path) -> None:
    sentences = [f"Sentence number {n} says that value{n} was found in the year {1000 + n}." for n in range(40)]
    text = " ".join(sentences)
    qas = [
        {
            "question": f"When was value{n} found?",
            "answers": [{"text": str(1000 + n), "answer_start": text.index(str(1000 + n))}],
        }
        for n in range(40)
    ]
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": text, "qas": qas}]}]}), encoding="utf-8")
    found = read_articles(path)
    assert len(found) > 2
    assert sum(len(each.asked) for each in found) == 40
    for each in found:
        assert all(answer in each.text for _, answer in each.asked)


def test_what_is_measured_on_is_left_out(file: Path, tmp_path: Path) -> None:
    texts = read_articles(file)
    measured = tmp_path / "measured.jsonl"
    measured.write_text(json.dumps({"input": "?", "context": f"Before. {texts[3].text.upper()} After.", "answers": []}))
    assert read_articles(file, measured_runs([measured])) == texts[:3] + texts[4:]


def test_some_articles_are_kept_for_development(file: Path) -> None:
    held = [is_held_out(each) for name in range(120) for each in [read_articles(file)[0].__class__(str(name), "", ())]]
    assert 2 < sum(held) < 25
