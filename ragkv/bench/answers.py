"""What sparse prefill costs in answers: the full context read under each policy, next to the same read densely.

    by depth    generated needle questions at several context lengths, grouped by where in the context the answer stands
    whole sets  the sets of docs/results/quality.md, with the paired difference to dense prefill

Under a policy every question is one prefill of S, chunks and question (`Reader.full`); the answer is decoded densely.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from ragkv.bench.prefill import Named
from ragkv.bench.quality import Progress, QualityOutcome, ask_all, context_tokens
from ragkv.bench.sets import QuestionSet, SetQuestion, natural_sets, needle_sets, pages
from ragkv.bench.table import Row, rows
from ragkv.engine.methods import FULL
from ragkv.model.decoder import DecoderModel


@dataclass(frozen=True)
class NeedleParams:
    """lengths: tokens of the contexts, roughly: as many chunks of the profile's size as fit · bins: equal parts of the
    context · sets, questions: per length, and of each set · seed: of the first set."""

    lengths: tuple[int, ...] = (2048, 4096, 7168)
    bins: int = 5
    sets: int = 4
    questions: int = 25
    seed: int = 201
    max_tokens: int = 24


@dataclass(frozen=True)
class DepthRow:
    """Answers that stand between the shares `low` and `high` of the context. tokens: mean length of the contexts ·
    read: query-key pairs that prefill computed, as a share of those of dense prefill."""

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
    """Dense prefill (as `full`) and every policy, by length and depth; parts in which no answer stands are left out.

    Raises InputError when a context is too long for the model.
    """
    found: list[DepthRow] = []
    for length in params.lengths:
        count = max(1, length // model.profile.chunk_tokens)
        asked = _needles(model, params.sets, count, params.questions, params.seed)
        tokens = round(statistics.fmean(context_tokens(model, each) for each in asked))
        outcomes = ask_all(model, asked, _names(policies), progress, params.max_tokens, policies=dict(policies))
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
    """Name of the questions -> a row for dense prefill (as `full`) and one for each policy.

    Raises InputError when a context is too long for the model.
    """
    return {
        name: rows(ask_all(model, asked, _names(policies), progress, max_tokens, policies=dict(policies)))
        for name, asked in sets.items()
    }


def whole_sets(model: DecoderModel, max_tokens: int = 24) -> dict[str, list[QuestionSet]]:
    """100 needle questions of seed 201 and the natural questions, each with 8 and with 16 chunks, by name; without
    those whose contexts the model cannot read."""
    sets = {f"needles, {chunks} chunks": _needles(model, 4, chunks, 25, 201) for chunks in (8, 16)}
    sets |= {f"natural, {chunks} chunks": natural_sets(chunks) for chunks in (8, 16)}
    room = model.max_positions - max_tokens
    return {name: asked for name, asked in sets.items() if max(context_tokens(model, each) for each in asked) <= room}


def prose(model: DecoderModel, length: int) -> list[int]:
    """Token ids of an input that is text: S and chunks of the natural documents, repeated where they run out."""
    found = list(model.prompt.prefix)
    texts = [(page.title, piece) for page in pages() for piece in page.pieces]
    for title, text in cycle(texts):
        if len(found) >= length:
            break
        found += model.prompt.chunk(title, text)
    return found[:length]


def depth(asked: QuestionSet, question: SetQuestion) -> float:
    """Where the answer starts, as a share of the context's characters. Raises ValueError where that is not known."""
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


def _needles(model: DecoderModel, sets: int, chunks: int, questions: int, seed: int) -> list[QuestionSet]:
    """As `ragkv bench quality` makes them."""
    size = model.profile.chunk_tokens - 32
    return needle_sets(sets, chunks, size, questions, seed, lambda text: len(model.prompt.plain(text)))


def _names(policies: Sequence[Named]) -> tuple[str, ...]:
    return (FULL, *(name for name, _ in policies))
