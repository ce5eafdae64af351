"""The dashboard tells how sure an answer is by a word, and when no passage holds a word of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragkv.api.dashboard.answer_text import deciding_of, describe_answer, to_source
from ragkv.api.dashboard.export import as_markdown
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.engine.kv_map import KVMap
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


def test_without_a_sentence_that_decides_the_closest_one_is_shown() -> None:
    report = replace(rule_report("service", "tiny", StepTimer()), rule="", held=0.0)
    text = "Grey water. It was designed by Ines Halloran. Boats sail."
    cited = Citation("d", "d#0", "Skerrow Light", 0.5, text=text, start=0)
    answer = Answer("Was the Skerrow Light designed by Ines Halloran?", "yes", (cited,), report)
    shown = deciding_of(answer, [to_source(1, cited)])
    assert shown is not None
    assert shown["text"] == "It was designed by Ines Halloran."
    assert shown["said"] == "The closest sentence:"
    assert NOT_HELD not in describe_answer(answer, 0.0)
    assert deciding_of(replace(answer, question="Who rules?"), [to_source(1, cited)]) is None
    assert deciding_of(replace(answer, answer="Ines Halloran", report=replace(report, held=1.0)), []) is None


def test_an_unknown_is_not_called_likely_without_saying_what_is() -> None:
    report = replace(rule_report("service", "tiny", StepTimer()), rule="", confidence=0.9)
    note = describe_answer(Answer("Who?", "unknown", (), report), 0.0)
    assert note.startswith("The passages that were found do not say. That this is right is likely.")


def test_exported_text_has_no_markup_of_its_own() -> None:
    report = replace(rule_report("service", "tiny", StepTimer()), rule="", held=1.0)
    answer = Answer("Who is <b>*Ada*</b>?", "[x](y)", (), report)
    text = as_markdown([RecordedAnswer("1", "", "default", "", answer, KVMap(1, 0, ()), 0.0, when=1.0)])
    assert "## Who is \\<b\\>\\*Ada\\*\\</b\\>?" in text
    assert "\\[x\\](y)" in text
