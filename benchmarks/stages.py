"""Answers of stitched requests under prefill and decode policies, beside those of the same requests read densely.

Every question is asked as a request is answered: its chunks come from stored KV in memory (or are prefilled, with
`full`), repaired tokens and the question attend under the prefill policy, and the answer is decoded under the decode
policy. So the first token, too, depends on what a prefill policy leaves out.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from benchmarks.grid import TextGrid, number, spread
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.policies import DENSE, make_decode_policy, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import FULL, make_method
from ragkv.evaluation.decoded import DecodedAnswer, PairedScore, decode_answer, keys_read, paired_score
from ragkv.evaluation.quality import Progress, check_fits
from ragkv.evaluation.sets import QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class Stages:
    """How requests are answered: a method, a prefill policy and a decode policy, each NAME[:FIELD=VALUE,…]."""

    method: str
    prefill: str = DENSE
    decode: str = DENSE


@dataclass(frozen=True)
class StageScore(PairedScore):
    """One combination of stages over questions; dense attention is the same method with both stages dense.

    Attributes:
        pairs: query-key pairs that the prefill read / those of dense attention.
        keys: keys read / keys present, over all decode steps.
        present: keys present a step.
    """

    stages: Stages
    pairs: float
    keys: float
    present: float


@dataclass(frozen=True)
class _StagedAnswer:
    """One answer, and the pairs that its prefill read and those of dense attention."""

    decoded: DecodedAnswer
    pairs: tuple[int, int]


def compare_stages(
    model: DecoderModel,
    sets: abc.Sequence[QuestionSet],
    stages: abc.Sequence[Stages],
    progress: Progress,
    max_tokens: int = 24,
) -> list[StageScore]:
    """Ask every question with every combination of stages, and with both stages dense.

    Raises:
        InputError: A context is too long for the model, or there is no such method or policy.
    """
    for asked in sets:
        check_fits(model, asked, max_tokens)
    every = list(dict.fromkeys([Stages(each.method) for each in stages] + list(stages)))
    prefiller = Prefiller(model, model.prompt.prefix)
    answers: dict[Stages, list[_StagedAnswer]] = {each: [] for each in every}
    total, done = sum(len(asked.questions) for asked in sets), 0
    for asked in sets:
        chunks = [model.prompt.chunk(title, text) for title, text in asked.chunks]
        sources = [
            InMemoryChunk(prefiller.encode(chunk), model.profile.block, i == 0) for i, chunk in enumerate(chunks)
        ]
        for question in asked.questions:
            for stage in every:
                answers[stage].append(_answer(prefiller, sources, question, stage, max_tokens))
            done += 1
            progress("ask", done, total)
    return [_score(each, answers[each], answers[Stages(each.method)]) for each in every]


def _answer(
    prefiller: Prefiller, sources: abc.Sequence[InMemoryChunk], question: SetQuestion, stages: Stages, max_tokens: int
) -> _StagedAnswer:
    model, timer = prefiller.model, StepTimer(prefiller.model.device)
    policies = make_prefill_policy(stages.prefill, model.profile), make_decode_policy(stages.decode, model.profile)
    tokens, options = model.prompt.question(question.text), PrefillOptions(max_tokens, *policies)
    if stages.method == FULL:
        context = prefiller.prefill_full([source.tokens for source in sources], tokens, timer, options)
    else:
        context = prefiller.prefill_sparse(sources, tokens, make_method(stages.method, model), timer, options)
    sparse = context.sparse
    pairs = (0, 0) if sparse is None else (sparse.pairs_read, sparse.dense_pairs)
    return _StagedAnswer(decode_answer(model, context, question, max_tokens), pairs)


def _score(stages: Stages, answers: abc.Sequence[_StagedAnswer], dense: abc.Sequence[_StagedAnswer]) -> StageScore:
    decoded = [one.decoded for one in answers]
    read, pairs = (sum(one.pairs[i] for one in answers) for i in range(2))
    keys = keys_read(decoded)
    return StageScore(
        **vars(paired_score(decoded, [one.decoded for one in dense])),
        stages=stages,
        pairs=read / pairs if pairs else 1.0,
        keys=keys.share,
        present=keys.present,
    )


def stage_grid(found: abc.Sequence[StageScore]) -> TextGrid:
    """Shares in percent, differences in points."""
    heads = ("method", "prefill", "decode", "number", "EM", "F1", "Δ F1 to dense (95%)", "pairs read", "keys read")
    rows = [
        (
            row.stages.method,
            row.stages.prefill,
            row.stages.decode,
            str(row.questions),
            number(row.em, ".1f", 100),
            number(row.f1, ".1f", 100),
            spread(row.delta, row.low, row.high),
            number(row.pairs, ".1f", 100),
            number(row.keys, ".1f", 100),
        )
        for row in found
    ]
    return TextGrid(heads, tuple(rows), words=3)
