import json
import re
from typing import Any

import pytest

from ragkv.cli.samples import samples_folder

DOCUMENTS = {path.stem: path.read_text("utf-8") for path in sorted(samples_folder().glob("*.md"))}
QUESTION_LINES = (samples_folder() / "questions.jsonl").read_text().splitlines()
QUESTIONS: list[dict[str, Any]] = [json.loads(line) for line in QUESTION_LINES]


def words(text: str) -> str:
    """Text with line breaks as blanks, so that a wrapped phrase is found."""
    return " ".join(text.split())


def test_there_are_enough_documents_with_different_titles() -> None:
    titles = {text.splitlines()[0] for text in DOCUMENTS.values()}
    assert len(DOCUMENTS) >= 14
    assert len(titles) == len(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_a_numbered_file_with_a_title_and_paragraphs(name: str) -> None:
    title, blank, *body = DOCUMENTS[name].splitlines()
    assert re.fullmatch(r"\d\d-[a-z0-9-]+", name)
    assert re.fullmatch(r"# \S.*\S", title)
    assert blank == ""
    assert 250 <= len(" ".join(body).split()) <= 700
    assert len([paragraph for paragraph in "\n".join(body).split("\n\n") if paragraph.strip()]) >= 4


@pytest.mark.parametrize("name", [*(f"{name}.md" for name in DOCUMENTS), "questions.jsonl"])
def test_a_file_holds_plain_characters_only(name: str) -> None:
    raw = (samples_folder() / name).read_bytes()
    assert raw.isascii()
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]|[ ]\n|  ", raw)
    assert raw.endswith(b"\n")
    assert not raw.endswith(b"\n\n")


def test_the_questions_are_of_every_kind_and_mostly_about_one_document() -> None:
    kinds = [question["kind"] for question in QUESTIONS]
    assert len(kinds) >= 12
    assert kinds.count("two") >= 3
    assert 1 <= kinds.count("none") <= 2
    assert kinds.count("one") > len(kinds) / 2
    assert len({question["q"] for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["q"])
def test_a_question_names_the_documents_that_hold_its_answer(question: dict[str, Any]) -> None:
    assert set(question) == {"q", "a", "kind", "documents"}
    assert question["q"].endswith("?")
    assert len(set(question["documents"])) == {"one": 1, "two": 2, "none": 0}[question["kind"]]
    if question["kind"] == "none":
        assert question["a"] == ["unknown"]
    else:
        assert any(answer in words(DOCUMENTS[name]) for name in question["documents"] for answer in question["a"])


@pytest.mark.parametrize(
    "question", [question for question in QUESTIONS if question["kind"] == "two"], ids=lambda question: question["q"]
)
def test_no_document_answers_a_two_document_question_alone(question: dict[str, Any]) -> None:
    subject = re.findall(r"(?<=\s)[A-Z]\w+|\w+-\w+", question["q"])
    assert subject
    for text in DOCUMENTS.values():
        named = all(name in words(text) for name in subject)
        assert not (named and any(answer in words(text) for answer in question["a"]))
    first, second = (words(DOCUMENTS[name]) for name in question["documents"])
    assert all(name in first for name in subject)
    assert question["a"][0] in second
