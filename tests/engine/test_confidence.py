"""Confidence: a logistic model of token probabilities and similarity, None where it was not measured."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.engine.confidence import confidence_of, evidence_of
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.logits import StepLogits
from ragkv.model.kv_cache import ContextCache
from ragkv.model.profile import Profile
from ragkv.report import Evidence
from ragkv.types import Chunk, Hit, Shape


def hit(similarity: float) -> Hit:
    return Hit(Chunk("d#0", "d", 0, "t", "x", (1,)), 0.1, 1, similarity)


def test_the_features_are_the_mean_the_least_and_the_best_similarity() -> None:
    assert evidence_of([-0.5, -2.0, 0.0], [hit(0.2), hit(0.7)]) == Evidence(pytest.approx(-2.5 / 3), -2.0, 0.7)


def test_the_confidence_is_the_sigmoid_of_the_weighted_features() -> None:
    evidence = Evidence(-0.5, -2.0, 0.7)
    expected = 1 / (1 + math.exp(-(1.0 + 2.0 * -0.5 + 3.0 * -2.0 + 4.0 * 0.7)))
    assert confidence_of(evidence, (1.0, 2.0, 3.0, 4.0)) == pytest.approx(expected)
    assert confidence_of(evidence, (0.0, 0.0, 0.0, 0.0)) == 0.5
    assert confidence_of(evidence, (-1e6, 0.0, 0.0, 0.0)) == pytest.approx(0.0)


def test_a_model_that_was_not_measured_has_no_confidence() -> None:
    assert confidence_of(Evidence(-0.5, -2.0, 0.7), Profile().confidence) is None


@pytest.mark.parametrize("wrong", [(1.0,), (1.0, 2.0, 3.0, math.nan), (1.0, 2.0, 3.0, "4"), (1.0, 2.0, 3.0, True)])
def test_coefficients_of_another_form_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="confidence: 4 numbers"):
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
