"""What `ragkv ask` says of an answer: a word for the confidence, words that no passage holds, answers by rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ragkv.cli import run
from ragkv.cli.ask import Printer, footer
from ragkv.engine.service_rules import rule_report
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
