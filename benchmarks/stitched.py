"""Prefill policies on stitched contexts: repair and question pass under each, on a model of random weights.

Chunks are encoded once and lie in a tier. Every policy answers new random questions by the same method, and policies
take turns. Steps are those of the timer, which waits for the device at their ends:

    repair    tokens recomputed in the stitched cache
    prefill   the question, over what the plan kept
    ttft      from the question's token ids to the first answer token's id, without these waits

`ratio` is dense / this one's, for repair and prefill together. On random weights only times mean something.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.asked import CHUNKS, QUESTIONS, drawn
from benchmarks.fitted import fitted
from benchmarks.grid import TextGrid, number
from benchmarks.prefill import Progress
from benchmarks.roofline import settled
from benchmarks.shapes import random_tokens
from benchmarks.tiered import TieredBenchStore, tiered_bench_store
from ragkv.engine.policies import DENSE, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.registry import make_method
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class StitchedParams:
    """What is measured.

    Attributes:
        chunks: Number of chunks.
        chunk_tokens: Tokens per chunk.
        method: NAME[:FIELD=VALUE,…] of a method that reads stored KV.
        policies: Prefill policies beside dense, likewise.
        repeat: Timed questions per policy, after `warmup` untimed ones.
        question: Tokens of a question.
        prefix: Tokens of S.
        seed: Seed of all tokens.
    """

    chunks: int = 64
    chunk_tokens: int = 1024
    method: str = "cacheblend"
    policies: tuple[str, ...] = ("critiprefill",)
    repeat: int = 5
    warmup: int = 2
    question: int = 32
    prefix: int = 16
    seed: int = 0


@dataclass(frozen=True)
class StitchedRow:
    """One policy; medians in milliseconds.

    Attributes:
        policy: As given.
        ttft: Time to the first token.
        repair: Of the step.
        prefill: Of the step.
        pairs: Query-key pairs read / those of dense attention.
        ratio: `repair` + `prefill` of dense / those of this policy.
        why_dense: Why the policy did not act; "" if it did.
    """

    policy: str
    ttft: float
    repair: float
    prefill: float
    pairs: float
    ratio: float
    why_dense: str


def measure(model: DecoderModel, params: StitchedParams, progress: Progress) -> list[StitchedRow]:
    """Time every policy, dense first.

    Raises:
        InputError: A length does not fit the model, or there is no such method or policy.
    """
    p, model = params, fitted(model)
    needed = p.prefix + p.chunks * p.chunk_tokens + p.question + 1
    if min(p.chunks, p.chunk_tokens, p.question, p.repeat) < 1 or needed > model.max_positions:
        raise InputError(f"{needed} tokens of context, question and answer; {model.name} reads {model.max_positions}")
    prefiller = Prefiller(model, random_tokens(model, p.prefix, p.seed))
    chunks = [drawn(model, p.chunk_tokens, p.seed, CHUNKS + i) for i in range(p.chunks)]
    with tiered_bench_store(model, "gpu" if model.device.type == "cuda" else "host", "") as stored:
        for done, tokens in enumerate(chunks, 1):
            stored.put(prefiller.encode(tokens))
            progress("encode", done, len(chunks))
        stored.fill_tier()
        asked = _Asked(prefiller, stored, chunks, p)
        names = tuple(dict.fromkeys((DENSE, *p.policies)))
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(p.warmup + p.repeat):
            for name in names:
                taken = asked.first_token(name)
                if turn >= p.warmup:
                    times[name].append(taken)
            progress("ask", turn + 1, p.warmup + p.repeat)
        rows = [asked.row(name, statistics.median(times[name])) for name in names]
    base = rows[0].repair + rows[0].prefill
    return [StitchedRow(**{**vars(row), "ratio": base / (row.repair + row.prefill)}) for row in rows]


class _Asked:
    """Questions about the stored chunks."""

    def __init__(
        self, prefiller: Prefiller, stored: TieredBenchStore, chunks: Sequence[tuple[int, ...]], params: StitchedParams
    ):
        self._prefiller, self._stored, self._chunks, self._params = prefiller, stored, chunks, params
        self._questions = self._draw()

    def _draw(self) -> Iterator[tuple[int, ...]]:
        at = QUESTIONS
        while True:
            yield drawn(self._prefiller.model, self._params.question, self._params.seed, at)
            at += 1

    def first_token(self, policy: str) -> float:
        """Milliseconds from a new question to the id of the first answer token."""
        device, question = self._prefiller.model.device, next(self._questions)
        settled(device)
        start = time.perf_counter()
        context, _ = self._prefill(policy, question)
        int(context.logits.argmax())  # waits for the device
        return 1000 * (time.perf_counter() - start)

    def row(self, policy: str, ttft: float) -> StitchedRow:
        """Time the steps of `repeat` questions more."""
        found = [self._prefill(policy, next(self._questions)) for _ in range(self._params.repeat)]
        context = found[-1][0]
        repair, prefill = (
            statistics.median(timer.elapsed(name) for _, timer in found) for name in ("repair", "prefill")
        )
        pairs = context.sparse.computed_pairs / context.sparse.dense_pairs if context.sparse else 1.0
        return StitchedRow(policy, ttft, repair, prefill, pairs, 1.0, context.dense.prefill)

    def _prefill(self, policy: str, question: Sequence[int]) -> tuple[PrefilledContext, StepTimer]:
        model, timer = self._prefiller.model, StepTimer(self._prefiller.model.device)
        made = make_prefill_policy(policy, model.profile)
        sources = [self._stored.open(tokens, exact=i == 0) for i, tokens in enumerate(self._chunks)]
        options = PrefillOptions(1, prefill_policy=made)
        method = make_method(self._params.method, model)
        return self._prefiller.prefill_sparse(sources, question, method, timer, options), timer


def grid(rows: Sequence[StitchedRow]) -> TextGrid:
    """Return the table."""
    lines = [
        (
            row.policy,
            number(row.ttft, ".1f"),
            number(row.repair, ".1f"),
            number(row.prefill, ".1f"),
            number(row.pairs, ".3f"),
            number(row.ratio, ".2f"),
            row.why_dense,
        )
        for row in rows
    ]
    return TextGrid(("policy", "ttft ms", "repair ms", "prefill ms", "pairs read", "ratio", "why dense"), tuple(lines))
