"""The fit of the confidence model, and how reliable it is.

    fit            logistic regression with a ridge and weights that are not negative, by Newton's method, on answers
                   that were judged by gold answers
    reliability    of probabilities that were predicted out of fold: every question by a fit that did not see it

Expected calibration error: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3. Coverage at a
precision: the risk-coverage trade-off of El-Yaniv and Wiener, "On the Foundations of Noise-free Selective
Classification", JMLR 2010.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragkv.engine.confidence import FEATURES, confidence_of
from ragkv.errors import InputError
from ragkv.report import Evidence

LEAST = 20
"""Fewest judged answers that a fit needs."""
RIDGE = 1.0
"""Penalty of the weights of standardised features. The bias has none."""
FOLDS, BINS = 10, 10
PRECISIONS = (0.8, 0.9, 0.95)
_STEPS = 50


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer that was compared with gold answers. right: whether it is one of them."""

    evidence: Evidence
    right: bool


@dataclass(frozen=True)
class Coverage:
    """What abstaining costs.

    Attributes:
        precision: Share of the answers that are right, at least, where the confidence is not below `threshold`.
        coverage: Share of the questions that are then answered; 0.0 where no threshold gives this precision.
        threshold: The lowest such threshold; 1.0 where there is none.
    """

    precision: float
    coverage: float
    threshold: float


@dataclass(frozen=True)
class Reliability:
    """How well probabilities predict which answers are right.

    Attributes:
        questions: Number of questions.
        accuracy: Share of right answers.
        confidence: Mean probability.
        calibration_error: Expected calibration error over BINS bins of equal width.
        brier: Mean squared difference of probability and outcome.
        auroc: Probability that a right answer has a higher confidence than a wrong one; 0.5 where one kind is missing.
        coverages: One for each of PRECISIONS.
    """

    questions: int
    accuracy: float
    confidence: float
    calibration_error: float
    brier: float
    auroc: float
    coverages: tuple[Coverage, ...]


def check_enough(count: int) -> None:
    """Raise InputError where so many answers are too few for a fit."""
    if count < LEAST:
        raise InputError(f"a fit needs {LEAST} answers at least, right ones and wrong ones; there are {count}")


def fit(judged: Sequence[JudgedAnswer], ridge: float = RIDGE) -> tuple[float, ...]:
    """Fit the coefficients (bias, one weight for each of FEATURES).

    No weight is negative, so that more probable tokens and a better passage never lower the confidence. Mean and least
    log probability say nearly the same, and a free fit of few answers sets one against the other. A feature whose
    weight would be negative is left out, the worst one first.

    Args:
        judged: Answers of the model that is measured.
        ridge: Penalty of the weights.

    Raises:
        InputError: There are too few answers, or all of them are right or wrong.
    """
    right = np.array([each.right for each in judged], np.float64)
    if len(judged) < LEAST or right.min() == right.max():
        raise InputError(f"a fit needs {LEAST} answers at least, right ones and wrong ones; there are {len(judged)}")
    return _fit(judged, ridge)


def _fit(judged: Sequence[JudgedAnswer], ridge: float) -> tuple[float, ...]:
    right = np.array([each.right for each in judged], np.float64)
    if right.min() == right.max():  # a fold without one kind of outcome: its share, by Laplace's rule of succession
        return (math.log((right.sum() + 1) / (len(right) - right.sum() + 1)), *([0.0] * len(FEATURES)))
    raw = _features(judged)
    mean, deviation = raw.mean(0), np.maximum(raw.std(0), 1e-9)
    design = np.column_stack([np.ones(len(raw)), (raw - mean) / deviation])
    free = list(range(design.shape[1]))
    while True:
        weights = np.zeros(design.shape[1])
        weights[free] = _newton(design[:, free], right, ridge)
        worst = int(weights[1:].argmin()) + 1
        if weights[worst] >= 0:
            break
        free.remove(worst)
    slopes = weights[1:] / deviation
    return (float(weights[0] - slopes @ mean), *map(float, slopes))


def _newton(design: NDArray[np.float64], right: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    """Maximise the penalised likelihood, which is concave. design: [answers, columns], the first column is 1."""
    penalty = np.diag([0.0] + [ridge] * (design.shape[1] - 1))
    weights = np.zeros(design.shape[1])
    for _ in range(_STEPS):
        predicted = 1 / (1 + np.exp(-design @ weights))
        gradient = design.T @ (right - predicted) - penalty @ weights
        curvature = (design.T * (predicted * (1 - predicted))) @ design + penalty
        step = np.linalg.solve(curvature + 1e-9 * np.eye(len(weights)), gradient)
        weights += step
        if np.abs(step).max() < 1e-10:
            break
    return weights


def out_of_fold(judged: Sequence[JudgedAnswer], folds: int = FOLDS) -> list[float]:
    """Predict every answer by a fit on the other folds. Answer i belongs to fold i mod `folds`. Raises as `fit`."""
    fit(judged)
    predicted = [math.nan] * len(judged)
    for fold in range(folds):
        coefficients = _fit([each for i, each in enumerate(judged) if i % folds != fold], RIDGE)
        for i in range(fold, len(judged), folds):
            predicted[i] = confidence_of(judged[i].evidence, coefficients) or 0.0
    return predicted


def reliability(probabilities: Sequence[float], right: Sequence[bool]) -> Reliability:
    """Compare probabilities with outcomes. Both have one value for each question, and there is at least one."""
    p, y = np.array(probabilities, np.float64), np.array(right, np.float64)
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    gaps = [abs(float((p[bins == b] - y[bins == b]).sum())) for b in range(BINS)]
    wins = (
        (p[y == 1][:, None] > p[y == 0]).mean() + (p[y == 1][:, None] == p[y == 0]).mean() / 2
        if 0 < y.mean() < 1
        else 0.5
    )
    return Reliability(
        questions=len(p),
        accuracy=float(y.mean()),
        confidence=float(p.mean()),
        calibration_error=sum(gaps) / len(p),
        brier=float(((p - y) ** 2).mean()),
        auroc=float(wins),
        coverages=tuple(_coverage(p, y, precision) for precision in PRECISIONS),
    )


def _coverage(p: NDArray[np.float64], y: NDArray[np.float64], precision: float) -> Coverage:
    for threshold in np.unique(p):
        answered = p >= threshold
        if y[answered].mean() >= precision:
            return Coverage(precision, float(answered.mean()), float(threshold))
    return Coverage(precision, 0.0, 1.0)


def _features(judged: Sequence[JudgedAnswer]) -> NDArray[np.float64]:
    """Return [answers, features]."""
    return np.array([[getattr(each.evidence, name) for name in FEATURES] for each in judged], np.float64)
