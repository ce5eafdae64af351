"""What `ragkv ask` says of an answer: a word for the confidence, words that no passage holds, answers by rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv.cli import run
from ragkv.cli.answer_text import SENTENCE, footer, place_of, sentence_of
from ragkv.cli.ask import Printer, _for_few
from ragkv.config import Settings
from ragkv.engine.service_rules import rule_report
from ragkv.passages import Citation, Mark
from ragkv.report import NOT_HELD, Answer
from ragkv.timing import StepTimer


def answered(confidence: float | None = None, held: float | None = 1.0, abstained: bool = False) -> Answer:
    report = replace(rule_report("service", "tiny", StepTimer()), rule="")
    return Answer("Who?", "Ada", (), replace(report, confidence=confidence, held=held, abstained=abstained))


@pytest.mark.parametrize(("confidence", "word"), [(0.91, "likely"), (0.5, "possible"), (0.123, "unsure")])
def test_the_confidence_is_told_by_a_word_and_not_by_digits(confidence: float, word: str) -> None:
    told = footer(answered(confidence))
    assert f" · {word} · " in told
    assert str(confidence) not in told
    assert "confidence" not in told
    assert f" · {word}, withheld · " in footer(answered(confidence, abstained=True))


def test_an_answer_of_which_no_passage_holds_a_word_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Printer(as_json=False, several=False).answer(answered(0.5, held=0.0))
    assert NOT_HELD in capsys.readouterr().out
    for other in (answered(0.5), answered(0.5, held=None), answered(0.5, held=0.0, abstained=True)):
        Printer(as_json=False, several=False).answer(other)
    assert NOT_HELD not in capsys.readouterr().out


def test_a_greeting_is_answered_without_any_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "hello", "--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "There are no documents yet." in " ".join(printed.split())
    assert "answered by a rule (greeting)" in printed
    assert run(["ask", "Who built the harbour?", "--data", str(tmp_path)]) == 1


def cited(text: str, answer: str, start: int = 0) -> Citation:
    """A passage that is all one sentence, `start` characters behind the beginning of its document."""
    at = start + text.index(answer)
    mark = Mark(at, at + len(answer), start, start + len(text))
    return Citation(
        "notes/tarn.md", "notes/tarn.md#2", "Tarn", 0.033, heading="Harbour", start=start, text=text, marks=(mark,)
    )


@pytest.mark.parametrize(
    ("document_id", "place", "shown"),
    [
        ("fees.xlsx", {"heading": "Summer 2026"}, "fees.xlsx, Summer 2026"),
        ("fees.pptx", {"heading": "Fees", "page": 3}, "fees.pptx, slide 3"),
        ("fees.PDF", {"page": 3}, "fees.PDF, page 3"),
    ],
)
def test_a_passage_is_placed_as_people_call_it(document_id: str, place: dict[str, Any], shown: str) -> None:
    assert place_of(Citation(document_id, f"{document_id}#0", "", 0.1, **place)) == shown


def test_an_answer_shows_the_passage_that_holds_it_and_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    other = Citation("notes/mell.md", "notes/mell.md#0", "Mell", 0.031, text="The bridge of Mell is green.")
    holding = cited("The harbour was built in 1889\nby Ada Brook.", "Ada Brook", 700)
    Printer(as_json=False, several=False).answer(replace(answered(), citations=(other, holding)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "  [2] Tarn  notes/tarn.md, Harbour",
        "      The harbour was built in 1889 by Ada Brook.",
        "  also read: [1] notes/mell.md",
    ]
    assert "0.03" not in "".join(lines[:4]), "a rank score says nothing to a reader"


def test_of_several_sentences_the_one_that_the_question_asks_about_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Present: Ada, Otto. Ada looks after the music. Ada left."
    marks = tuple(Mark(at, at + 3, *sentence) for at, sentence in ((9, (0, 19)), (20, (20, 46)), (47, (47, 56))))
    citation = Citation("minutes.docx", "minutes.docx#0", "Minutes", 0.03, start=0, text=text, marks=marks)
    answer = replace(answered(), question="Who looks after the MUSIC?", citations=(citation,))
    Printer(as_json=False, several=False).answer(answer)
    assert "      Ada looks after the music." in capsys.readouterr().out.splitlines()


def test_a_document_of_several_passages_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    read = [Citation(f"{name}.md", f"{name}.md#{n}", name, 0.03) for n, name in enumerate(("tarn", "mell", "tarn"))]
    Printer(as_json=False, several=False).answer(replace(answered(), citations=tuple(read)))
    assert "  read: [1][3] tarn.md, [2] mell.md" in capsys.readouterr().out.splitlines()


def test_without_a_passage_that_holds_it_what_was_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    read = replace(cited("The harbour is old.", "old"), marks=())
    Printer(as_json=False, several=False).answer(replace(answered(), citations=(read,)))
    assert "  read: [1] notes/tarn.md" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("before", [0, 200, 2000])
def test_a_long_sentence_is_cut_around_the_answer(before: int) -> None:
    text = "so " * (before // 3) + "by Ada Brook " + "and on " * 300
    shown = sentence_of(cited(text, "Ada Brook", 50))
    assert "Ada Brook" in shown
    assert len(shown) <= SENTENCE + 2
    assert (shown.startswith("…"), shown.endswith("…")) == (before > SENTENCE // 2, True)


def test_a_copy_of_the_weights_is_not_made_for_one_question() -> None:
    """It takes seconds of a processor, and a few answers save less than that."""
    assert _for_few(Settings(weights="auto")).weights == "exact"
    assert _for_few(Settings(weights="fp8")).weights == "fp8"
