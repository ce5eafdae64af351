"""`ragkv bench decode --speculation`: tokens per second with and without drafts, in three cases.

    quoted      the context ends with tokens that stand in its first third, so that a trained model may go on quoting
                it; drafts come from the context
    accepted    drafts come from the answer itself, so all are accepted: the most that speculation can gain
    rejected    every n-gram is found and what follows it is wrong: the most that it can lose

Stop tokens do not stop. Each round decodes the same tokens once without drafts and once in each case, and the next
round does so in reverse order, because clocks and neighbours drift. The ratio is the median over rounds.
"""

from __future__ import annotations

import statistics
from collections import abc
from dataclasses import dataclass

import torch

from benchmarks.decode import Progress, now
from benchmarks.grid import TextGrid, number
from benchmarks.prefill import Tokens
from ragkv.engine.decoding import decode_step
from ragkv.engine.drafting import Drafter, DraftParams
from ragkv.engine.generation import Sampling, Sequence
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder, make_graph_decoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append

CASES = ("quoted", "accepted", "rejected")
QUOTED = 64
"""Tokens of the context with which it ends once more."""
WRONG = 16
"""Wrong tokens behind each n-gram of the case `rejected`."""


@dataclass(frozen=True)
class SpeculationParams:
    """What is measured.

    Attributes:
        lengths: tokens of the contexts.
        steps: tokens of an answer.
        rounds: times that each case is decoded, and decoding without drafts.
    """

    lengths: tuple[int, ...]
    steps: int = 64
    rounds: int = 4


@dataclass(frozen=True)
class SpeculationRow:
    """One case at one length.

    Attributes:
        plain: tokens per second without drafts, median over rounds.
        rate: tokens per second with drafts, likewise.
        ratio: rate / plain of a round, median over rounds.
        passes: passes that the answer took.
        drafted: tokens that were drafted.
        accepted: tokens of those that were accepted.
        same: tokens before the first that differs from decoding without drafts: all, but for rounding.
    """

    length: int
    case: str
    tokens: int
    plain: float
    rate: float
    ratio: float
    passes: int
    drafted: int
    accepted: int
    same: int


@dataclass(frozen=True)
class _Context:
    """A context that is prefilled."""

    model: DecoderModel
    graph_decoder: GraphDecoder | None
    tokens: abc.Sequence[int]
    cache: ContextCache
    logits: torch.Tensor

    def decode(self, steps: int, drafter: Drafter | None) -> tuple[Sequence, float]:
        """Decode an answer; return its sequence, and seconds. The cache has its old rows afterwards."""
        lengths = list(self.cache.lengths)
        sequence = Sequence(self.cache, self.logits, len(self.tokens), Sampling(steps))
        sequence.drafter = drafter
        start = now(self.model.device.type)
        while sequence.sample(frozenset()) is not None:
            if not (sequence.ready or sequence.finished):
                decode_step(self.model, [sequence], self.graph_decoder)
        seconds = now(self.model.device.type) - start
        self.cache.truncate(lengths)
        return sequence, seconds


@torch.inference_mode()
def measure(model: DecoderModel, params: SpeculationParams, progress: Progress, tokens: Tokens) -> list[SpeculationRow]:
    """Measure all cases at every length.

    Raises:
        InputError: a length is too long for the model, or too short to quote itself.
    """
    longest = max(params.lengths) + params.steps
    if min(params.lengths) < 3 * QUOTED or longest > model.max_positions:
        raise InputError(
            f"{longest} tokens of context and answer; {model.name} reads {model.max_positions}, and a context has "
            f"{3 * QUOTED} or more"
        )
    graph_decoder = make_graph_decoder(model)
    found = list[SpeculationRow]()
    for done, length in enumerate(params.lengths, start=1):
        given = list(tokens(model, length - QUOTED))
        given += given[length // 3 :][:QUOTED]
        cache = ContextCache(model.shape, length + params.steps, model.dtype, model.devices)
        logits = model.forward([append(cache, given, 0)])[0][-1]
        context = _Context(model, graph_decoder, given, cache, logits)
        answer = context.decode(params.steps, None)[0].tokens  # also the warm-up
        found += _cases(context, answer, params)
        progress("decode", done, len(params.lengths))
    return found


def _cases(context: _Context, answer: abc.Sequence[int], params: SpeculationParams) -> list[SpeculationRow]:
    """answer: what is decoded without drafts."""
    seconds: dict[str, list[float]] = {name: [] for name in ("", *CASES)}
    last: dict[str, Sequence] = {}
    for turn in range(params.rounds + 1):
        names = list(seconds)
        for name in names if turn % 2 else reversed(names):
            drafter = Drafter(_texts(name, context.tokens, answer)) if name else None
            last[name], took = context.decode(params.steps, drafter)
            if turn:  # the first round records graphs and warms up
                seconds[name].append(took)
    return [_row(context, name, last[name], answer, seconds) for name in CASES]


def _texts(case: str, context: abc.Sequence[int], answer: abc.Sequence[int]) -> list[abc.Sequence[int]]:
    """Return the texts that are drafted from."""
    if case == "quoted":
        return [context]
    if case == "accepted":
        return [answer]
    params = DraftParams()
    ends = range(params.shortest, len(answer))  # as long as any match in the answer itself, and before it
    return [[*answer[max(0, at - params.longest) : at], *[0 if answer[at] else 1] * WRONG] for at in ends]


def _row(
    context: _Context, case: str, run: Sequence, answer: abc.Sequence[int], seconds: dict[str, list[float]]
) -> SpeculationRow:
    assert run.drafter is not None
    count, plain, took = len(answer), seconds[""], seconds[case]
    differ = (at for at, pair in enumerate(zip(run.tokens, answer, strict=True)) if pair[0] != pair[1])
    return SpeculationRow(
        *(len(context.tokens), case, count),
        plain=count / statistics.median(plain),
        rate=count / statistics.median(took),
        ratio=statistics.median(one / other for one, other in zip(plain, took, strict=True)),
        passes=run.steps,
        drafted=run.drafter.drafted,
        accepted=run.drafter.accepted,
        same=next(differ, count),
    )


def grid(rows: abc.Sequence[SpeculationRow]) -> TextGrid:
    """Rates in tokens per second."""
    heads = ("context", "case", "without", "tokens/s", "×", "passes", "drafted", "accepted", "same tokens")
    cells = [
        (
            str(row.length),
            row.case,
            *(number(each, ".1f") for each in (row.plain, row.rate)),
            number(row.ratio, ".2f"),
            *(str(each) for each in (row.passes, row.drafted, row.accepted)),
            f"{row.same} of {row.tokens}",
        )
        for row in rows
    ]
    return TextGrid(heads, tuple(cells), words=2)
