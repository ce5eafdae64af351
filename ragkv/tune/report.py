"""The report of a tuning run: answers before and after, under full attention and over stored KV.

Two scores say how good the answers are:

    F1          against the answer that was given, or that a rule took from the text
    agreement   F1 against what the model answered under full attention before it was tuned
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

from ragkv.engine.registry import FULL
from ragkv.evaluation.evidence import packaged_evidence
from ragkv.evaluation.quality import QualityParams, ask_all
from ragkv.evaluation.quality_figures import QualityOutcome
from ragkv.evaluation.score import f1, interval
from ragkv.evaluation.sets import QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.tune.contexts import Source

KEPT, UNREPAIRED = "scout:repair=kept", "scout:repair=none"
METHODS = (FULL, "reuse", KEPT, UNREPAIRED)
ALLOWED_LOSS = 0.01
"""F1 that scout may lose to its repaired form before a profile says that the model needs repair."""

Progress = Callable[[str, int, int], None]


At = tuple[int, int]
"""Number of a set, and of a question in it."""


@dataclass(frozen=True)
class ReportRow:
    """One method over the held-out questions, before or after; means.

    Attributes:
        when: Before or after tuning.
        method: The method.
        questions: Number of questions.
        em: Exact match with the given answer.
        f1: F1 against it.
        delta: `f1` minus that of full attention before tuning, on the same questions.
        low: Lower end of the 95% interval of `delta`, by a paired bootstrap.
        high: Upper end.
        agreement: F1 against the answer of full attention before tuning.
        sequence: Tokens kept / all tokens.
        recompute: Tokens recomputed / all tokens.
        ttft: Median milliseconds to the first token, without loading.
    """

    when: Literal["before", "after"]
    method: str
    questions: int
    em: float
    f1: float
    delta: float
    low: float
    high: float
    agreement: float
    sequence: float
    recompute: float
    ttft: float


@dataclass(frozen=True)
class Measured:
    """Rows of one model.

    Attributes:
        rows: A row for each method.
        full: Its answers under full attention.
        f1: F1 of each method's answers.
    """

    rows: tuple[ReportRow, ...]
    full: Mapping[At, str]
    f1: Mapping[str, Mapping[At, float]]

    def row(self, method: str) -> ReportRow:
        """Return the row of a method."""
        return next(row for row in self.rows if row.method == method)


def held_out_sets(source: Source, contexts: int, tokens: int, seed: int) -> list[QuestionSet]:
    """Return sets of questions from a source that the training did not see.

    Args:
        source: Held-out text.
        contexts: Number of sets.
        tokens: Tokens of a set, about.
        seed: Seed of the sets.
    """
    sets = []
    for number in range(contexts):
        found = source.context(Random(f"report/{seed}/{number}"), tokens)
        asked = tuple(SetQuestion(each.text, (each.answer,), "") for each in found.asked)
        if asked:
            sets.append(QuestionSet(found.chunks, asked, f"context {number}"))
    return sets


def measure(
    model: DecoderModel,
    sets: Sequence[QuestionSet],
    when: Literal["before", "after"],
    progress: Progress,
    before: Measured | None = None,
) -> Measured:
    """Ask every question with every method.

    Args:
        model: The model.
        sets: The questions.
        when: Name of the rows.
        progress: Is told the progress.
        before: What was measured before tuning; None compares with this model's own full attention.
    """
    outcomes = ask_all(model, sets, METHODS, progress, QualityParams(evidence=packaged_evidence(model)))
    full = {outcome.at: outcome.answer for outcome in outcomes if outcome.method == FULL}
    scores = {
        method: {outcome.at: outcome.figures.f1 for outcome in outcomes if outcome.method == method}
        for method in METHODS
    }
    answers, reference = (before.full, before.f1[FULL]) if before else (full, scores[FULL])
    rows = [
        _row(when, method, [outcome for outcome in outcomes if outcome.method == method], answers, reference)
        for method in METHODS
    ]
    return Measured(tuple(rows), full, scores)


def _row(
    when: Literal["before", "after"],
    method: str,
    outcomes: Sequence[QualityOutcome],
    answers: Mapping[At, str],
    reference: Mapping[At, float],
) -> ReportRow:
    names = ("em", "f1", "sequence", "recompute")
    means = {name: statistics.fmean(getattr(outcome.figures, name) for outcome in outcomes) for name in names}
    differences = [outcome.figures.f1 - reference[outcome.at] for outcome in outcomes]
    low, high = interval(differences)
    return ReportRow(
        when,
        method,
        len(outcomes),
        delta=statistics.fmean(differences),
        low=low,
        high=high,
        agreement=statistics.fmean(f1(outcome.answer, (answers[outcome.at],)) for outcome in outcomes),
        ttft=statistics.median(outcome.figures.ttft for outcome in outcomes),
        **means,
    )


def loss(before: Measured, after: Measured) -> str:
    """Return what is surely worse after tuning, in one line: the 95% interval of the difference is below 0.

    Full attention must not lose, nor what reads stored KV without repair.
    """
    for method in (FULL, "reuse", UNREPAIRED):
        old, new = before.f1[method], after.f1[method]
        differences = [new[at] - old[at] for at in old]
        low, high = interval(differences)
        if high < 0:
            points = 100 * statistics.fmean(differences)
            return (
                f"{method} answers worse than before: {points:+.1f} points of F1 ({100 * low:+.1f} … {100 * high:+.1f})"
            )
    return ""


def needs_repair(after: Measured) -> bool:
    """Return whether scout loses more than `ALLOWED_LOSS` of F1 without repair."""
    return after.row(UNREPAIRED).f1 < after.row(KEPT).f1 - ALLOWED_LOSS


def as_json(before: Measured, after: Measured) -> list[dict[str, Any]]:
    """Return the rows as JSON objects."""
    return [asdict(row) for row in (*before.rows, *after.rows)]


def markdown(before: Measured, after: Measured) -> str:
    """Return the rows as a table; shares in percent, differences in points."""
    heads = ("", "method", "EM", "F1", "Δ to full before (95%)", "agreement", "sequence", "recompute", "TTFT ms")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row in (*before.rows, *after.rows):
        delta = f"{100 * row.delta:+.1f} ({100 * row.low:+.1f} … {100 * row.high:+.1f})"
        shares = [f"{100 * each:.1f}" for each in (row.agreement, row.sequence, row.recompute)]
        cells = (row.when, f"`{row.method}`", f"{100 * row.em:.1f}", f"{100 * row.f1:.1f}", delta, *shares)
        lines.append(f"| {' | '.join(cells)} | {row.ttft:.0f} |")
    return "\n".join(lines) + "\n"
