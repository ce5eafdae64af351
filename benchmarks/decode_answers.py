"""Answers under sparse decoding: one dense prefill of the full context, then the answer under every policy.

Chunks are prefilled once per set. The question is prefilled once per policy, so that the policy's state observes it;
the cache is truncated in between. The first token of an answer comes from the question's pass, which is dense, so a
policy affects the tokens from the second one on. With `early` the question's last token is decoded like a token of the
answer. Then the policy affects the first token too, and with it which fact is retrieved.
"""

from __future__ import annotations

import statistics
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.decode import Named
from benchmarks.grid import TextGrid, number, spread
from ragkv.engine.policies import DENSE
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.evaluation.decoded import DecodedAnswer, PairedScore, decode_answer, keys_read, paired_score
from ragkv.evaluation.quality import Progress, check_fits
from ragkv.evaluation.sets import QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import append
from ragkv.sparse.base import DecodePolicy, QueryObserver, decode_state
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class DecodeScore(PairedScore):
    """A policy over questions.

    Attributes:
        same: share of answers equal to those of dense decoding.
        read: keys read / keys present, over all steps.
        keys: keys read per token, layer and list of attention heads.
        steps: decoding steps of all answers.
    """

    policy: str
    same: float
    read: float
    keys: float
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
    """Return, by name of the questions, a row for dense decoding and one for each policy.

    Raises:
        InputError: a context is too long for the model.
    """
    for question_set in (one for asked in sets.values() for one in asked):
        check_fits(model, question_set, max_tokens)
    prefiller = Prefiller(model, model.prompt.prefix)
    total, done = sum(len(each.questions) for asked in sets.values() for each in asked), 0
    found = {}
    decoders: list[tuple[str, DecodePolicy | None]] = [(DENSE, None), *policies]
    for name, asked in sets.items():
        answers: dict[str, list[DecodedAnswer]] = {policy: [] for policy, _ in decoders}
        for question_set in asked:
            chunks = [model.prompt.chunk(title, text) for title, text in question_set.chunks]
            context = prefiller.prefill_full(chunks[:-1], chunks[-1], StepTimer(model.device), PrefillOptions(256))
            for question in question_set.questions:
                for policy, decoder in decoders:
                    answers[policy].append(_answer(model, context, question, decoder, early, max_tokens))
                done += 1
                progress("ask", done, total)
        found[name] = [_score(policy, answers[policy], answers[DENSE]) for policy, _ in decoders]
    return found


def _answer(
    model: DecoderModel,
    context: PrefilledContext,
    question: SetQuestion,
    decoder: DecodePolicy | None,
    early: bool,
    max_tokens: int,
) -> DecodedAnswer:
    cache, start = context.cache, context.position
    cache.truncate([start] * model.shape.layers)
    tokens = model.prompt.question(question.text)
    state = decode_state(decoder, start + len(tokens))
    attention, rows = (None, 1) if state is None else (QueryObserver(state, None, start), state.query_rows)
    first = tokens[:-1] if early else tokens
    logits = model.forward([append(cache, first, start, outputs=rows, attention=attention)])[0][-1]
    if early:
        last = append(cache, tokens[-1:], start + len(first), attention=state)
        logits = model.forward([last])[0][-1]
    asked = PrefilledContext(cache, logits, start + len(tokens), None, decoding=state)
    answer = decode_answer(model, asked, question, max_tokens)
    return replace(answer, steps=answer.steps + early)


def _score(policy: str, answers: abc.Sequence[DecodedAnswer], dense: abc.Sequence[DecodedAnswer]) -> DecodeScore:
    keys = keys_read(answers)
    return DecodeScore(
        **vars(paired_score(answers, dense)),
        policy=policy,
        same=statistics.fmean(one.text == other.text for one, other in zip(answers, dense, strict=True)),
        read=keys.share,
        keys=keys.read,
        steps=sum(one.steps for one in answers),
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
