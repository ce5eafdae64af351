"""What sparse decoding costs in answers: one dense prefill of the full context, then the answer under every policy.

Chunks are prefilled once a set, the question behind them once a policy, so that its state learns from it; the cache is
cut back in between. The first token of an answer comes from the question's pass, which is dense: a policy decides
from the second token on. With `early` the question's last token is read as if it were a token of the answer: then the
policy decides the first one, too, and with it what is retrieved.
"""

from __future__ import annotations

import statistics
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ragkv.bench.decode import Named
from ragkv.bench.grid import TextGrid, number, spread
from ragkv.bench.quality import Progress, check_fits
from ragkv.bench.score import exact_match, f1
from ragkv.bench.sets import QuestionSet, SetQuestion
from ragkv.bench.table import interval
from ragkv.engine.generation import Detokenizer, Sampling, Sequence, generate
from ragkv.engine.policies import DENSE
from ragkv.engine.prefill import PrefilledContext, Prefiller
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import append
from ragkv.sparse.base import DecodePolicy, DecodeState, QueryObserver
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class DecodeScore:
    """A policy over questions. delta, low, high: F1 less that of dense decoding, and the 95% interval of a paired
    bootstrap · same: answers word for word those of dense decoding · read: keys read / keys there, over all steps ·
    keys: read by a list of attention heads, a token and layer · steps: tokens of answers that were read."""

    policy: str
    questions: int
    em: float
    f1: float
    delta: float
    low: float
    high: float
    same: float
    read: float
    keys: float
    steps: int


@dataclass(frozen=True)
class _Told:
    """One answer: its text and scores, and keys read, keys there and lists of attention heads, over steps."""

    text: str
    em: float
    f1: float
    read: int
    present: int
    lists: int
    steps: int


@torch.inference_mode()
def compare(
    model: DecoderModel,
    sets: Mapping[str, abc.Sequence[QuestionSet]],
    policies: abc.Sequence[Named],
    progress: Progress,
    early: bool = False,
    max_tokens: int = 24,
) -> dict[str, list[DecodeScore]]:
    """Name of the questions -> a row for dense decoding and one for each policy.

    Raises InputError when a context is too long for the model.
    """
    for each in (one for asked in sets.values() for one in asked):
        check_fits(model, each, max_tokens)
    reader = Prefiller(model, model.prompt.prefix)
    total, done = sum(len(each.questions) for asked in sets.values() for each in asked), 0
    found = {}
    ways: list[tuple[str, DecodePolicy | None]] = [(DENSE, None), *policies]
    for name, asked in sets.items():
        told: dict[str, list[_Told]] = {policy: [] for policy, _ in ways}
        for each in asked:
            chunks = [model.prompt.chunk(title, text) for title, text in each.chunks]
            context = reader.prefill_full(chunks[:-1], chunks[-1], 256, StepTimer(model.device))
            for question in each.questions:
                for policy, decoder in ways:
                    told[policy].append(_answer(model, context, question, decoder, early, max_tokens))
                done += 1
                progress("ask", done, total)
        found[name] = [_score(policy, told[policy], told[DENSE]) for policy, _ in ways]
    return found


def _answer(
    model: DecoderModel,
    context: PrefilledContext,
    question: SetQuestion,
    decoder: DecodePolicy | None,
    early: bool,
    max_tokens: int,
) -> _Told:
    cache, start = context.cache, context.position
    cache.truncate([start] * model.shape.layers)
    tokens = model.prompt.question(question.text)
    state = decoder.start() if decoder is not None and decoder.applies(start + len(tokens)) else None
    attention, rows = (None, 1) if state is None else (QueryObserver(state, None, start), state.query_rows)
    first = tokens[:-1] if early else tokens
    logits = model.forward([append(cache, first, start, outputs=rows, attention=attention)])[0][-1]
    if early:
        last = append(cache, tokens[-1:], start + len(first), attention=state)
        logits = model.forward([last])[0][-1]
    speech = Detokenizer(model, model.profile.stop, StepTimer(model.device))
    run = Sequence(cache, logits, start + len(tokens), Sampling(max_tokens), state, speech)
    for _ in generate(model, run):
        pass
    text = speech.text.strip()
    scores = exact_match(text, question.gold, question.language), f1(text, question.gold, question.language)
    return _Told(text, *scores, *_reading(state), run.steps + early)


def _reading(state: DecodeState | None) -> tuple[int, int, int]:
    if state is None:
        return 0, 0, 0
    return state.keys_read, state.keys_present, sum(each.read.shape[0] for each in state.key_counts)


def _score(policy: str, told: abc.Sequence[_Told], dense: abc.Sequence[_Told]) -> DecodeScore:
    differences = [one.f1 - other.f1 for one, other in zip(told, dense, strict=True)]
    low, high = interval(differences)
    lists, present = sum(one.lists for one in told), sum(one.present for one in told)
    return DecodeScore(
        policy=policy,
        questions=len(told),
        em=statistics.fmean(one.em for one in told),
        f1=statistics.fmean(one.f1 for one in told),
        delta=statistics.fmean(differences),
        low=low,
        high=high,
        same=statistics.fmean(one.text == other.text for one, other in zip(told, dense, strict=True)),
        read=sum(one.read for one in told) / present if present else 1.0,
        keys=sum(one.read for one in told) / lists if lists else 0.0,
        steps=sum(one.steps for one in told),
    )


def grid(found: Mapping[str, abc.Sequence[DecodeScore]]) -> TextGrid:
    """Shares in percent, differences in points."""
    heads = ("questions", "decode", "number", "EM", "F1", "Δ F1 to dense (95%)", "same answer", "keys read", "keys")
    rows = [
        (
            name,
            row.policy,
            str(row.questions),
            number(row.em, ".1f", 100),
            number(row.f1, ".1f", 100),
            spread(row.delta, row.low, row.high),
            number(row.same, ".1f", 100),
            number(row.read, ".1f", 100),
            number(row.keys or None, ".0f"),
        )
        for name, table in found.items()
        for row in table
    ]
    return TextGrid(heads, tuple(rows), words=2)
