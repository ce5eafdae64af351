"""Confidence: the probability that an answer is right, from what retrieval and decoding say anyway.

A logistic model of three features:

    confidence = sigmoid(b + w1 · mean log probability + w2 · least log probability + w3 · similarity)

    mean log probability      of the answer's tokens, the one that ended it included, under the model at temperature 1
    least log probability     of the same tokens
    similarity                cosine of the question and the retrieved chunk that is most similar to it

The coefficients are measured on questions with known answers (`ragkv calibrate --confidence`) and stand in the model's
profile. A model without them has no confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ragkv.report import Evidence
from ragkv.types import Hit

FEATURES = ("mean_log_probability", "least_log_probability", "similarity")
"""Names of the features, in the order of the coefficients behind the bias."""


def evidence_of(log_probabilities: Sequence[float], hits: Sequence[Hit]) -> Evidence:
    """Return what a confidence is computed from.

    Args:
        log_probabilities: Of each token of the answer; at least one.
        hits: The retrieved chunks; at least one.
    """
    return Evidence(
        sum(log_probabilities) / len(log_probabilities), min(log_probabilities), max(hit.similarity for hit in hits)
    )


def confidence_of(evidence: Evidence, coefficients: Sequence[float]) -> float | None:
    """Return the probability, 0..1, that the answer is right; None without coefficients.

    Args:
        evidence: What is known of the answer.
        coefficients: (b, w1, w2, w3), or () for a model that was not measured.
    """
    if not coefficients:
        return None
    bias, *weights = coefficients
    score = bias + sum(w * getattr(evidence, name) for w, name in zip(weights, FEATURES, strict=True))
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, score))))  # exp overflows beyond
