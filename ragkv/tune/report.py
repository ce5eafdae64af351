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
from ragkv.evaluation.score import f1
from ragkv.evaluation.sets import QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.tune.contexts import Source

KEPT, UNREPAIRED = "scout:repair=kept", "scout:repair=none"
METHODS = (FULL, "reuse", KEPT, UNREPAIRED)
ALLOWED_LOSS = 0.01
"""F1 that scout may lose to its repaired form before a profile says that the model needs repair."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ReportRow:
    """One method over the held-out questions, before or after; means.

    Attributes:
        when: Before or after tuning.
        method: The method.
        questions: Number of questions.
        em: Exact match with the given answer.
        f1: F1 against it.
        agreement: F1 against the answer of full attention before tuning.
        sequence: Tokens kept / all tokens.
        recompute: Tokens recomputed / all tokens.
    """

    when: Literal["before", "after"]
    method: str
    questions: int
    em: float
    f1: float
    agreement: float
    sequence: float
    recompute: float


@dataclass(frozen=True)
class Measured:
    """Rows of one model, and its answers under full attention by (set, question)."""

    rows: tuple[ReportRow, ...]
    full: Mapping[tuple[int, int], str]

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
    full_before: Mapping[tuple[int, int], str] | None = None,
) -> Measured:
    """Ask every question with every method.

    Args:
        model: The model.
        sets: The questions.
        when: Name of the rows.
        progress: Is told the progress.
        full_before: Answers of full attention before tuning; None takes this model's own.
    """
    outcomes = ask_all(model, sets, METHODS, progress, QualityParams(evidence=packaged_evidence(model)))
    full = {outcome.at: outcome.answer for outcome in outcomes if outcome.method == FULL}
    expected = full if full_before is None else full_before
    rows = []
    for method in METHODS:
        mine = [outcome for outcome in outcomes if outcome.method == method]
        means = {
            name: statistics.fmean(getattr(each.figures, name) for each in mine)
            for name in ("em", "f1", "sequence", "recompute")
        }
        agreement = statistics.fmean(f1(each.answer, (expected[each.at],)) for each in mine)
        rows.append(ReportRow(when, method, len(mine), agreement=agreement, **means))
    return Measured(tuple(rows), full)


def needs_repair(after: Measured) -> bool:
    """Return whether scout loses more than `ALLOWED_LOSS` of F1 without repair."""
    return after.row(UNREPAIRED).f1 < after.row(KEPT).f1 - ALLOWED_LOSS


def as_json(before: Measured, after: Measured) -> list[dict[str, Any]]:
    """Return the rows as JSON objects."""
    return [asdict(row) for row in (*before.rows, *after.rows)]


def markdown(before: Measured, after: Measured) -> str:
    """Return the rows as a table; shares in percent."""
    lines = ["| | method | EM | F1 | agreement | sequence | recompute |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in (*before.rows, *after.rows):
        figures = (row.em, row.f1, row.agreement, row.sequence, row.recompute)
        lines.append(f"| {row.when} | `{row.method}` | " + " | ".join(f"{100 * each:.1f}" for each in figures) + " |")
    return "\n".join(lines) + "\n"
