"""Confidence: a logistic model of token probabilities and similarity, None where it was not measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ragkv.engine.citations import cite
from ragkv.engine.confidence import confidence_of, evidence_of, held_of
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.logits import StepLogits
from ragkv.model.kv_cache import ContextCache
from ragkv.model.profile import Profile
from ragkv.report import Evidence, describe_confidence
from ragkv.types import Chunk, Hit, Shape, TextSpan


def hit(similarity: float) -> Hit:
    return Hit(Chunk("d#0", "d", 0, "t", "x", (1,)), 0.1, 1, similarity)


def test_the_features_are_the_mean_the_least_and_the_best_similarity() -> None:
    found = evidence_of([-0.5, -2.0, 0.0], [hit(0.2), hit(0.7)])
    assert (found.mean_log_probability, found.least_log_probability, found.similarity) == (
        *(pytest.approx(-2.5 / 3), -2.0, 0.7),
    )


def evidence(answer: str, question: str = "Who built the old bridge of Tarn?", unknown: float = -3.0) -> Evidence:
    """The evidence of an answer from one passage."""
    text = "Ada Brook built the bridge. Otto sold the mill of Tarn."
    hits = [Hit(Chunk("d#0", "d", 0, "Tarn", text, (1,), TextSpan(0, len(text))), 0.1, 1, 0.5)]
    cited = cite(hits, answer, question)
    return evidence_of([-0.1], hits, unknown=unknown, question=question, answer=answer, citations=cited)


def test_the_support_is_the_share_of_the_question_in_the_sentence_of_the_answer_or_its_title() -> None:
    assert evidence("Ada Brook").support == pytest.approx(
        2 / 2
    )  # built, bridge; `old` names nothing, Tarn is the title
    assert evidence("Otto").support == pytest.approx(1 / 3)


def test_words_that_no_passage_holds_count_against_the_answer() -> None:
    assert evidence("Vala Ohm").support == -1.0
    assert evidence("Vala Brook").support == -0.5
    weights = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    assert (confidence_of(evidence("Vala Ohm"), weights) or 1) < 0.5 < (confidence_of(evidence("Otto"), weights) or 0)


def test_an_answer_is_known_as_far_as_unknown_was_improbable() -> None:
    assert evidence("Otto", unknown=-3.0).known == 3.0
    assert evidence("Otto", unknown=-30.0).known == 8.0
    found = evidence("unknown", unknown=-0.1)
    assert (found.known, found.support, found.unknown) == (0.0, 0.0, 1.0)


def test_the_share_of_an_answer_that_a_passage_holds() -> None:
    text = "Ada Brook built the bridge of Tarn in spring."
    hits = [Hit(Chunk("d#0", "d", 0, "", text, (1,), TextSpan(0, len(text))), 0.1)]
    question = "Was the bridge of Tarn built in spring?"
    held = {each: held_of(each, cite(hits, each, question)) for each in ("Ada Stone", "Vala", "yes", "unknown")}
    assert held == {"Ada Stone": 0.5, "Vala": 0.0, "yes": 1.0, "unknown": None}
    assert held_of("yes", cite(hits, "yes", "Did Otto sell the mill?")) == 0.0


def test_coefficients_of_an_earlier_release_count_the_features_that_they_know() -> None:
    earlier, found = (1.0, 2.0, 3.0, 4.0), replace(Evidence(-0.5, -2.0, 0.7), known=5.0, support=1.0)
    assert confidence_of(found, earlier) == confidence_of(found, (*earlier, 0.0, 0.0, 0.0))
    assert Profile(confidence=earlier).confidence == earlier


@pytest.mark.parametrize(("confidence", "word"), [(0.95, "likely"), (0.5, "possible"), (0.1, "unsure")])
def test_a_confidence_is_told_by_a_word(confidence: float, word: str) -> None:
    assert describe_confidence(confidence) == word


def test_the_confidence_is_the_sigmoid_of_the_weighted_features() -> None:
    found = Evidence(-0.5, -2.0, 0.7, 3.0, 0.5, 0.0)
    expected = 1 / (1 + math.exp(-(1.0 + 2.0 * -0.5 + 3.0 * -2.0 + 4.0 * 0.7 + 0.5 * 3.0 + 2.0 * 0.5)))
    assert confidence_of(found, (1.0, 2.0, 3.0, 4.0, 0.5, 2.0, 9.0)) == pytest.approx(expected)
    assert confidence_of(found, (0.0,) * 7) == 0.5
    assert confidence_of(found, (-1e6, *(0.0,) * 6)) == pytest.approx(0.0)


def test_a_model_that_was_not_measured_has_no_confidence() -> None:
    assert confidence_of(Evidence(-0.5, -2.0, 0.7), Profile().confidence) is None


@pytest.mark.parametrize("wrong", [(1.0,), (1.0, 2.0, 3.0, math.nan), (1.0, 2.0, 3.0, "4"), (1.0, 2.0, 3.0, True)])
def test_coefficients_of_another_form_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="confidence: 4 or 7 numbers"):
        Profile(confidence=wrong)


def test_log_probabilities_are_those_of_a_softmax_and_survive_the_buffer() -> None:
    logits = torch.tensor([0.3, 2.0, -1.0])
    found = StepLogits(logits[None]).rows()[0].log_probability(1)
    expected = float(logits.log_softmax(-1)[1])
    logits.zero_()
    assert float(found) == pytest.approx(expected)


def test_a_sequence_keeps_the_log_probability_of_every_token_and_of_the_stop_token() -> None:
    cache = ContextCache(Shape(1, 1, 1, 2), 4, torch.float32, (torch.device("cpu"),))
    rows = [torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0.0, 1.0, 5.0])]
    sequence = Sequence(cache, rows[0], 0, Sampling(max_tokens=5))
    assert sequence.sample(frozenset({2})) == 1
    sequence.accept(StepLogits(rows[1][None]).rows())
    assert sequence.sample(frozenset({2})) is None
    expected = [float(rows[0].log_softmax(-1)[1]), float(rows[1].log_softmax(-1)[2])]
    assert sequence.log_probabilities == pytest.approx(expected, abs=1e-6)
    assert sequence.tokens == [1]


def test_a_sequence_keeps_the_log_probability_of_another_first_token() -> None:
    cache = ContextCache(Shape(1, 1, 1, 2), 4, torch.float32, (torch.device("cpu"),))
    rows = [torch.tensor([0.0, 3.0, 1.0]), torch.tensor([9.0, 1.0, 5.0])]
    sequence = Sequence(cache, rows[0], 0, Sampling(max_tokens=5))
    sequence.other = 0
    sequence.sample(frozenset({2}))
    sequence.accept(StepLogits(rows[1][None]).rows())
    sequence.sample(frozenset({2}))
    assert sequence.other_log_probability == pytest.approx(float(rows[0].log_softmax(-1)[0]), abs=1e-6)
