"""Confidence: the probability that an answer is right, from what retrieval and decoding say anyway.

A logistic model:

    confidence = sigmoid(b + w1 · mean log probability + w2 · least log probability + w3 · similarity
                           + w4 · known + w5 · support + w6 · unknown)

    mean log probability      of the answer's tokens, the one that ended it included, under the model at temperature 1
    least log probability     of the same tokens
    similarity                cosine of the question and the retrieved chunk that is most similar to it
    known                     minus the log probability that the answer begins as `unknown` does, at most MOST_KNOWN
    support                   share of the question's words in a sentence in which the answer is marked, or its title;
                              without a mark, minus the share of the answer's words that no passage holds
    unknown                   1 for the answer `unknown`, for which known and support are 0

The coefficients are measured on questions with known answers (`ragkv calibrate --confidence`) and stand in the model's
profile. A model without them has no confidence. Profiles of earlier releases have the first four: the features that
they lack count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ragkv.engine.support import held_share, is_judgement, stems
from ragkv.passages import Citation, is_unknown
from ragkv.report import Evidence
from ragkv.types import Hit

FEATURES = ("mean_log_probability", "least_log_probability", "similarity", "known", "support", "unknown")
"""Names of the features, in the order of the coefficients behind the bias."""
MOST_KNOWN = 8.0
"""Largest value of `known`."""


def evidence_of(
    log_probabilities: Sequence[float],
    hits: Sequence[Hit],
    *,
    unknown: float = 0.0,
    question: str = "",
    answer: str = "",
    citations: Sequence[Citation] = (),
) -> Evidence:
    """Return what a confidence is computed from.

    Args:
        log_probabilities: Of each token of the answer; at least one.
        hits: The retrieved chunks; at least one.
        unknown: Log probability that the answer begins as `unknown` does.
        question: The question.
        answer: Text of the answer.
        citations: Of the answer.
    """
    mean, least = sum(log_probabilities) / len(log_probabilities), min(log_probabilities)
    similarity = max(hit.similarity for hit in hits)
    if is_unknown(answer):
        return Evidence(mean, least, similarity, unknown=1.0)
    support = support_of(question, citations) or (held_of(answer, citations) or 0.0) - 1.0
    return Evidence(mean, least, similarity, min(MOST_KNOWN, -unknown), support)


def support_of(question: str, citations: Sequence[Citation]) -> float:
    """Return the largest share of the question's words in a sentence in which the answer is marked, or its title."""
    sought = stems(question)
    return max(
        (
            len(
                sought & (stems(each.text[mark.sentence_start - start : mark.sentence_end - start]) | stems(each.title))
            )
            / len(sought)
            for each in citations
            if (start := each.start) is not None
            for mark in each.marks
            if sought
        ),
        default=0.0,
    )


def held_of(answer: str, citations: Sequence[Citation]) -> float | None:
    """Return the share of an answer's words that a cited passage holds; for `yes` and `no`, whether a sentence decides.

    None for `unknown`, and where nothing is cited.
    """
    if not citations or is_unknown(answer):
        return None
    if is_judgement(answer):
        return float(any(each.marks for each in citations))
    return held_share(answer, [each.text for each in citations])


def confidence_of(evidence: Evidence, coefficients: Sequence[float]) -> float | None:
    """Return the probability, 0..1, that the answer is right; None without coefficients.

    Args:
        evidence: What is known of the answer.
        coefficients: The bias and a weight for each of the FEATURES, or for the first ones; () for a model that was not
            measured.
    """
    if not coefficients:
        return None
    bias, *weights = coefficients
    score = bias + sum(w * getattr(evidence, name) for w, name in zip(weights, FEATURES, strict=False))
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, score))))  # exp overflows beyond
