"""The dashboard tells how sure an answer is by a word, and when no passage holds a word of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragkv.api.dashboard.answer_card import describe_answer
from ragkv.engine.service_rules import rule_report
from ragkv.passages import Citation
from ragkv.report import NOT_HELD, Answer
from ragkv.timing import StepTimer

CITED = (Citation("d", "d#0", "Tarn", 0.5),)


@pytest.mark.parametrize(("confidence", "word"), [(0.91, "Likely."), (0.5, "Possible."), (0.1, "Unsure.")])
def test_a_word_tells_how_sure_an_answer_is(confidence: float, word: str) -> None:
    report = replace(rule_report("service", "tiny", StepTimer()), rule="", confidence=confidence, held=1.0)
    note = describe_answer(Answer("Who?", "Ada", CITED, report), 0.0)
    assert note.startswith(f"{word} First token after")
    assert "%" not in note


def test_an_answer_that_no_passage_holds_is_told() -> None:
    report = replace(rule_report("service", "tiny", StepTimer()), rule="", held=0.0)
    assert describe_answer(Answer("Who?", "Ada", CITED, report), 0.0).startswith(NOT_HELD)
