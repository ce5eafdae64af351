"""The fit finds the coefficients that made the outcomes, and reliability is computed as defined."""

from __future__ import annotations

import numpy as np
import pytest

from ragkv.engine.confidence import confidence_of
from ragkv.errors import InputError
from ragkv.evaluation.confidence import BINS, JudgedAnswer, fit, out_of_fold, reliability
from ragkv.report import Evidence

TRUE = (1.0, 2.0, 0.5, 3.0, 0.4, 1.5, 1.0)


def judged(count: int, seed: int = 0) -> list[JudgedAnswer]:
    """Answers whose outcomes are drawn with the probabilities of TRUE."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        logs = -float(rng.exponential(1.0)), -float(rng.exponential(3.0))
        unknown = rng.random() < 0.3
        known, support = (0.0, 0.0) if unknown else (float(rng.uniform(0, 8)), float(rng.uniform(-1, 1)))
        evidence = Evidence(*logs, float(rng.uniform(-0.2, 0.9)), known, support, float(unknown))
        found.append(JudgedAnswer(evidence, bool(rng.random() < (confidence_of(evidence, TRUE) or 0.0))))
    return found


def test_a_fit_of_many_answers_finds_the_coefficients() -> None:
    assert fit(judged(20_000)) == pytest.approx(TRUE, abs=0.25)


def test_a_fit_is_the_same_every_time_and_a_ridge_shrinks_it() -> None:
    answers = judged(200)
    assert fit(answers) == fit(answers)
    assert all(abs(small) < abs(large) for small, large in zip(fit(answers, 1e6)[1:], fit(answers)[1:], strict=True))


def test_a_feature_that_would_lower_the_confidence_is_left_out() -> None:
    backwards = [
        JudgedAnswer(
            Evidence(
                each.evidence.mean_log_probability, -each.evidence.least_log_probability - 9, each.evidence.similarity
            ),
            each.right,
        )
        for each in judged(2000)
    ]
    bias, mean, least, similarity, *_ = fit(backwards)
    assert least == 0.0
    assert min(mean, similarity) > 0
    assert np.isfinite(bias)


def test_separable_answers_have_finite_coefficients() -> None:
    answers = [JudgedAnswer(Evidence(-n / 10, -n / 5, 0.5), n < 15) for n in range(30)]
    coefficients = fit(answers)
    assert np.isfinite(coefficients).all()
    assert (
        (confidence_of(answers[0].evidence, coefficients) or 0)
        > 0.9
        > 0.1
        > (confidence_of(answers[-1].evidence, coefficients) or 0)
    )


@pytest.mark.parametrize("answers", [judged(5), [JudgedAnswer(Evidence(-1.0, -1.0, 0.0), True)] * 40])
def test_too_few_or_equal_outcomes_are_refused(answers: list[JudgedAnswer]) -> None:
    with pytest.raises(InputError, match="right ones and wrong ones"):
        fit(answers)


def test_a_prediction_out_of_fold_does_not_see_its_own_outcome() -> None:
    answers = judged(60)
    flipped = [JudgedAnswer(answers[0].evidence, not answers[0].right), *answers[1:]]
    assert out_of_fold(answers)[0] == out_of_fold(flipped)[0]
    assert out_of_fold(answers)[1] != out_of_fold(flipped)[1]


def test_reliability_of_known_probabilities() -> None:
    found = reliability([0.95] * 10 + [0.15] * 10, [True] * 9 + [False] + [True] * 2 + [False] * 8)
    assert found.calibration_error == pytest.approx((10 * 0.05 + 10 * 0.05) / 20)
    assert (found.accuracy, found.questions, BINS) == (0.55, 20, 10)
    assert found.auroc == pytest.approx((9 * 8 + 0.5 * (9 * 1 + 2 * 8)) / 99 + 0.0, abs=0.02)
    eighty, ninety, more = found.coverages
    assert (eighty.coverage, eighty.threshold) == (0.5, 0.95)
    assert (ninety.coverage, more.coverage, more.threshold) == (0.5, 0.0, 1.0)


def test_probabilities_that_are_right_have_a_small_error() -> None:
    answers = judged(5000)
    true = [confidence_of(each.evidence, TRUE) or 0.0 for each in answers]
    assert reliability(true, [each.right for each in answers]).calibration_error < 0.03
