"""Given questions: read from JSON lines, asked about the passages that share their words."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ragkv.errors import InputError
from ragkv.tune.given import GivenQuestion, given_source, rank, read_questions
from tests.tune.tiny_folder import passages


def test_questions_are_read_with_and_without_answers(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"q": "Who?", "a": ["Ada", "Ada Brook"]}\n\n{"q": "Where?"}\n', encoding="utf-8")
    assert read_questions(file) == [GivenQuestion("Who?", "Ada"), GivenQuestion("Where?", "")]


@pytest.mark.parametrize("text", ["", "[]\n", '{"a": ["x"]}\n', "{\n"])
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"q\.jsonl"):
        read_questions(file)
    with pytest.raises(InputError, match="missing"):
        read_questions(tmp_path / "missing.jsonl")


def test_the_passages_with_the_rare_words_come_first() -> None:
    texts = ["the quay of Tarn", "the mill of Holm and the quay", "the book"]
    assert rank(["Where is the mill?", "quay of tarn", "zebra", "?!"], texts, 2) == [[1, 2], [0, 1], [], []]


def test_a_context_holds_the_best_passages_and_the_question() -> None:
    texts = passages(24)
    source = given_source(
        [GivenQuestion("Who built the harbour of Skerrow in 1814?", "Mira Stone")], texts, lambda c: 30
    )
    found = source.context(Random(1), 200)
    assert [(each.text, each.answer) for each in found.asked] == [(source.given[0].text, "Mira Stone")]
    assert "1814" in " ".join(text for _, text in found.chunks)
    assert len(found.chunks) == 3  # 200 tokens, of which 96 are for the question


def test_questions_without_an_answer_get_the_teachers() -> None:
    asked = [GivenQuestion("Who built the harbour of Holm?"), GivenQuestion("When?", "1801")]
    source = given_source(asked, passages(24), lambda c: 30)
    heard: list[tuple[int, str]] = []

    def answer(chunks: object, question: str) -> str:
        heard.append((len(chunks), question))  # type: ignore[arg-type]
        return "Ines Vale"

    done = source.answered(answer, lambda *far: None)
    assert [each.answer for each in done.given] == ["Ines Vale", "1801"]
    assert heard == [(8, "Who built the harbour of Holm?")]
