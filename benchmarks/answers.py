"""Answers under sparse prefill: the full context prefilled under each policy, compared with dense prefill.

    by depth    generated needle questions at several context lengths, grouped by the answer's place in the context
    whole sets  the sets of docs/results/quality.md, with the paired difference to dense prefill

Under a policy every question is one prefill of prefix, chunks and question (`Prefiller.prefill_full`). Answers are
decoded densely.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from benchmarks.natural import natural_sets, pages
from benchmarks.prefill import Named
from ragkv.engine.registry import FULL
from ragkv.evaluation.quality import Progress, QualityParams, ask_all, context_tokens
from ragkv.evaluation.quality_figures import QualityOutcome
from ragkv.evaluation.sets import QuestionSet, SetQuestion, needle_sets
from ragkv.evaluation.table import Row, rows
from ragkv.model.decoder import DecoderModel


@dataclass(frozen=True)
class NeedleParams:
    """Which needle questions are asked.

    Attributes:
        lengths: approximate tokens of the contexts: as many chunks of the profile's size as fit.
        bins: equal parts of the context.
        sets: sets per length.
        questions: questions per set.
        seed: seed of the first set.
        max_tokens: longest answer.
    """

    lengths: tuple[int, ...] = (2048, 4096, 7168)
    bins: int = 5
    sets: int = 4
    questions: int = 25
    seed: int = 201
    max_tokens: int = 24


@dataclass(frozen=True)
class DepthRow:
    """Answers that stand between the shares `low` and `high` of the context.

    Attributes:
        tokens: mean length of the contexts.
        questions: number of questions.
        em: mean exact match.
        f1: mean F1.
        read: query-key pairs that prefill computed / those of dense prefill.
    """

    tokens: int
    policy: str
    low: float
    high: float
    questions: int
    em: float
    f1: float
    read: float


def needles_by_depth(
    model: DecoderModel, policies: Sequence[Named], params: NeedleParams, progress: Progress
) -> list[DepthRow]:
    """Measure dense prefill (as `full`) and every policy, by length and depth. Parts without an answer are left out.

    Raises:
        InputError: a context is too long for the model.
    """
    found: list[DepthRow] = []
    for length in params.lengths:
        count = max(1, length // model.profile.chunk_tokens)
        asked = generated_sets(model, params.sets, count, params.questions, params.seed)
        tokens = round(statistics.fmean(context_tokens(model, each) for each in asked))
        how = QualityParams(params.max_tokens, policies=dict(policies))
        outcomes = ask_all(model, asked, _names(policies), progress, how)
        for policy in _names(policies):
            mine = [outcome for outcome in outcomes if outcome.method == policy]
            found += _by_depth(asked, mine, tokens, policy, params.bins)
    return found


def compare(
    model: DecoderModel,
    sets: Mapping[str, Sequence[QuestionSet]],
    policies: Sequence[Named],
    progress: Progress,
    max_tokens: int = 24,
) -> dict[str, list[Row]]:
    """Return, by name of the questions, a row for dense prefill (as `full`) and one for each policy.

    Raises:
        InputError: a context is too long for the model.
    """
    params = QualityParams(max_tokens, policies=dict(policies))
    return {name: rows(ask_all(model, asked, _names(policies), progress, params)) for name, asked in sets.items()}


def whole_sets(model: DecoderModel, max_tokens: int = 24) -> dict[str, list[QuestionSet]]:
    """Return the question sets by name, without those whose contexts are too long for the model.

    They are 100 needle questions of seed 201 and the natural questions, each with 8 and with 16 chunks.
    """
    sets = {f"needles, {chunks} chunks": generated_sets(model, 4, chunks, 25, 201) for chunks in (8, 16)}
    sets |= {f"natural, {chunks} chunks": natural_sets(chunks) for chunks in (8, 16)}
    room = model.max_positions - max_tokens
    return {name: asked for name, asked in sets.items() if max(context_tokens(model, each) for each in asked) <= room}


def generated_sets(model: DecoderModel, sets: int, chunks: int, questions: int, seed: int) -> list[QuestionSet]:
    """Return generated needle sets whose chunks have the size of the model's profile."""
    size = model.profile.chunk_tokens - 32
    return needle_sets(sets, chunks, size, questions, seed, lambda text: len(model.prompt.plain(text)))


def prose(model: DecoderModel, length: int) -> list[int]:
    """Token ids of a text: the prefix and chunks of the natural documents, repeated as often as needed."""
    found = list(model.prompt.prefix)
    texts = [(page.title, piece) for page in pages() for piece in page.pieces]
    for title, text in cycle(texts):
        if len(found) >= length:
            break
        found += model.prompt.chunk(title, text)
    return found[:length]


def depth(asked: QuestionSet, question: SetQuestion) -> float:
    """Where the answer starts, as a share of the context's characters. Raises ValueError if that is not known."""
    if question.span is None:
        raise ValueError("the answer's place is not known")
    sizes = [len(title) + len(text) for title, text in asked.chunks]
    before = sum(sizes[: question.span.chunk]) + len(asked.chunks[question.span.chunk][0]) + question.span.start
    return before / sum(sizes)


def _by_depth(
    asked: Sequence[QuestionSet], outcomes: Sequence[QualityOutcome], tokens: int, policy: str, bins: int
) -> list[DepthRow]:
    parts: dict[int, list[QualityOutcome]] = {}
    for outcome in outcomes:
        part = int(bins * depth(asked[outcome.at[0]], outcome.question))
        parts.setdefault(min(part, bins - 1), []).append(outcome)
    return [
        DepthRow(
            tokens=tokens,
            policy=policy,
            low=part / bins,
            high=(part + 1) / bins,
            questions=len(mine),
            em=statistics.fmean(outcome.figures.em for outcome in mine),
            f1=statistics.fmean(outcome.figures.f1 for outcome in mine),
            read=statistics.fmean(outcome.figures.read or 0.0 for outcome in mine),
        )
        for part, mine in sorted(parts.items())
    ]


def _names(policies: Sequence[Named]) -> tuple[str, ...]:
    return (FULL, *(name for name, _ in policies))
