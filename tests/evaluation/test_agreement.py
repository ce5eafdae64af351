"""What reading stored KV costs in answers: methods in the order of their cost, until one is within the tolerance."""

from dataclasses import replace

import pytest

from ragkv.engine.calibration import CalibrationQuestion, CalibrationSet
from ragkv.engine.needles import make_needles
from ragkv.evaluation import agreement
from ragkv.evaluation.agreement import CANDIDATES, Agreement, measure_agreement, question_sets, with_agreement
from ragkv.evaluation.evidence import set_evidence
from ragkv.evaluation.quality import ask_all
from ragkv.model.profile import Profile
from tests.ingest.reader import WordEmbedder


@pytest.fixture(scope="module")
def sets(model):
    made = make_needles(7, 2, 120, 3, lambda text: len(model.prompt.plain(text)))
    numbers = {document.id: number for number, document in enumerate(made.documents)}
    asked = tuple(CalibrationQuestion(q.question, numbers[q.document_id], q.start, q.end) for q in made.questions)
    return [CalibrationSet(tuple((document.title, document.text) for document in made.documents), asked)]


def test_the_gold_answer_of_a_question_is_its_place_in_the_text(sets):
    (found,) = question_sets(sets)
    for question in found.questions:
        text = found.chunks[question.span.chunk][1]
        assert question.gold == (text[question.span.start : question.span.end],)


def test_the_quickest_method_within_the_tolerance_is_the_last_one_asked(model, sets):
    evidence = set_evidence(model, WordEmbedder())
    (first,) = measure_agreement(model, question_sets(sets), evidence, 100.0, lambda *_: None)
    assert (first.method, first.questions, first.within) == (CANDIDATES[0], 3, True)
    assert first.low <= first.delta <= first.high


def test_where_no_method_is_within_it_all_are_measured_and_full_is_the_default(model, sets, monkeypatch):
    def worse(*given):
        """Answers of full as they are, those of others wrong."""
        return [
            each if each.method == "full" else replace(each, figures=replace(each.figures, f1=0.0))
            for each in ask_all(*given)
        ]

    monkeypatch.setattr(agreement, "ask_all", worse)
    found = measure_agreement(model, question_sets(sets), set_evidence(model, WordEmbedder()), 0.0, lambda *_: None)
    assert [each.method for each in found] == list(CANDIDATES)
    assert not any(each.within for each in found)
    assert (with_agreement(Profile(), found).method, with_agreement(Profile(), found).agreement[1]) == ("full", 0.0)


def test_the_profile_keeps_the_method_and_what_was_measured_of_it():
    measured = [
        Agreement("scout:repair=none", 40, -3.0, -6.0, 0.0, False),
        Agreement("scout", 40, -0.5, -2.0, 1.0, True),
    ]
    profile = with_agreement(Profile(), measured)
    assert (profile.method, profile.agreement) == ("scout", (40.0, -0.5, -2.0, 1.0))
    told = "scout: -0.5 points of F1 to full (-2.0 … +1.0), 40 questions about your documents"
    assert (Profile().quality, profile.quality) == ("", told)
    with pytest.raises(ValueError, match="agreement"):
        replace(profile, agreement=(1.0,))
