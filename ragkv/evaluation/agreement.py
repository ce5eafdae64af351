"""What reading stored KV costs in answers, measured with questions about a user's own documents.

Methods are asked beside `full` in the order of their cost. The first whose F1 is within a tolerance of full's becomes
the model's default; where none is, `full` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragkv.engine.calibration import CalibrationSet
from ragkv.engine.evidence import EvidenceFinder
from ragkv.engine.registry import FULL
from ragkv.evaluation.quality import Progress, QualityParams, ask_all
from ragkv.evaluation.quality_figures import QualityOutcome
from ragkv.evaluation.sets import GoldSpan, QuestionSet, SetQuestion
from ragkv.evaluation.table import rows
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile

CANDIDATES = ("scout:repair=none", "scout", "scout:cap=0.3", "cacheblend")
"""Methods, the quickest first."""


@dataclass(frozen=True)
class Agreement:
    """How the answers of a method compare with those of `full`.

    Attributes:
        method: The method.
        questions: Questions that were asked.
        delta: Its F1 minus full's on the same questions, in points.
        low: Lower end of the 95% interval of `delta`, by a paired bootstrap.
        high: Upper end.
        within: Whether `delta` is within the tolerance.
    """

    method: str
    questions: int
    delta: float
    low: float
    high: float
    within: bool


def question_sets(sets: Sequence[CalibrationSet]) -> list[QuestionSet]:
    """Return the questions of a calibration with their answers."""
    return [
        QuestionSet(
            each.chunks,
            tuple(
                SetQuestion(
                    asked.text,
                    (each.chunks[asked.chunk][1][asked.start : asked.end],),
                    "one",
                    GoldSpan(asked.chunk, asked.start, asked.end),
                )
                for asked in each.questions
            ),
        )
        for each in sets
    ]


def measure_agreement(
    model: DecoderModel, sets: Sequence[QuestionSet], evidence: EvidenceFinder, within: float, progress: Progress
) -> list[Agreement]:
    """Ask methods until one is within the tolerance.

    Args:
        model: The model, with its profile.
        sets: Questions with answers.
        evidence: Finds evidence in their chunks.
        within: F1 that a method may lose to `full`, in points.
        progress: Called after each question.

    Returns:
        What was measured, in the order of CANDIDATES. Where the last one is not within, none was.

    Raises:
        InputError: A set does not fit the model.
    """
    found, done = list[Agreement](), dict[tuple[int, int, str], QualityOutcome]()
    for method in CANDIDATES:
        outcomes = ask_all(model, sets, (FULL, method), progress, QualityParams(done=done, evidence=evidence))
        done |= {(*each.at, each.method): each for each in outcomes if each.method == FULL}
        row = rows(outcomes)[1]
        delta, low, high = (100 * (each or 0.0) for each in (row.delta, row.low, row.high))
        found.append(Agreement(method, row.questions, delta, low, high, delta >= -within))
        if found[-1].within:
            break
    return found


def with_agreement(profile: Profile, measured: Sequence[Agreement]) -> Profile:
    """Return the profile with the default method that was found, and what was measured of it."""
    last = measured[-1]
    if not last.within:
        return replace(profile, method=FULL, agreement=(float(last.questions), 0.0, 0.0, 0.0))
    return replace(profile, method=last.method, agreement=(float(last.questions), last.delta, last.low, last.high))
