"""Cost of a token in a whole model, by context length and number of requests that decode together.

The context is prefilled once and copied for every request. Each request prefills a question of `question` tokens, which
its policy's state observes, and then decodes `steps` tokens. One forward pass per step decodes all requests. Stop
tokens do not stop. The time between tokens is that between two moments at which the host knows the tokens of all
requests, as a service publishes them. The times are cache-ready: they include no prefill and no store. The dense rows
are the model's own loop over torch's fused attention.

A policy may have keys in host memory: LFPS with `split`, and PSA over a pool (`SpeedParams.pool`).
"""

from __future__ import annotations

import statistics
import time
from collections import abc
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from benchmarks.decode import Named, now
from benchmarks.grid import TextGrid, number
from benchmarks.prefill import Tokens
from ragkv.engine.decoding import decode_step
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.policies import DENSE
from ragkv.errors import InputError
from ragkv.evaluation.quality import Progress
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder, make_graph_decoder
from ragkv.model.execution.pooled_decode import PooledDecoder
from ragkv.model.execution.split_context import SplitContext, split_context
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.base import DecodePolicy, DecodeState, QueryObserver, decode_state
from ragkv.sparse.psa import Psa

RECORDED = "dense, recorded"


@dataclass(frozen=True)
class SpeedParams:
    """What is measured.

    Attributes:
        lengths: keys of the contexts, question included.
        batches: numbers of requests that decode together.
        steps: timed steps, after `warmup` untimed ones. Every decoder takes them twice.
        question: tokens that the policies' states observe first.
        pool: PSA decodes from host memory, over a pool with room for this share of the KV; None keeps it on the device.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    steps: int = 32
    warmup: int = 3
    question: int = 24
    pool: float | None = None


@dataclass(frozen=True)
class SpeedRow:
    """One decoder at one length and batch.

    Attributes:
        rate: tokens per second of all requests.
        p50: median milliseconds between two tokens of a request.
        p99: likewise, the 99th percentile.
        ratio: rate / rate of dense decoding at the same length and batch.
        read: keys read / keys present.
        kv: bytes of K and V that one token of one request reads, over all layers.
        crossed: bytes that a step of all requests moves between host and device memory: queries, results, blocks.
    """

    length: int
    batch: int
    policy: str
    rate: float
    p50: float
    p99: float
    ratio: float
    read: float
    kv: float
    crossed: float


@dataclass(frozen=True)
class _Case:
    """A context that is prefilled, and all of its tokens, the question's included."""

    model: DecoderModel
    params: SpeedParams
    context: ContextCache
    tokens: abc.Sequence[int]


@dataclass(frozen=True)
class _Decoder:
    """How tokens are decoded: name, policy (None: dense), and the graph decoder if dense steps are recorded."""

    name: str
    policy: DecodePolicy | None = None
    graph_decoder: GraphDecoder | None = None


@torch.inference_mode()
def measure(
    model: DecoderModel, params: SpeedParams, policies: abc.Sequence[Named], progress: Progress, tokens: Tokens
) -> list[SpeedRow]:
    """Measure dense decoding and every policy, at every length and batch.

    On a GPU for which steps can be recorded (graph_decode.py), dense decoding is measured with recorded steps too.

    Raises:
        InputError: a length is too long for the model, or not longer than the question.
    """
    p, found = params, list[SpeedRow]()
    longest = max(p.lengths) + p.warmup + p.steps + 1
    if min(p.lengths) <= p.question or longest > model.max_positions:
        raise InputError(
            f"{longest} tokens of context and answer; {model.name} reads {model.max_positions}, and a context has more "
            f"than the {p.question} of its question"
        )
    graph_decoder = make_graph_decoder(model)
    decoders = [_Decoder(DENSE), *([_Decoder(RECORDED, graph_decoder=graph_decoder)] if graph_decoder else [])]
    decoders += [_Decoder(name, policy, graph_decoder) for name, policy in policies]
    total, done = 2 * len(p.lengths) * len(p.batches) * len(decoders), 0
    for length in p.lengths:
        given = list(tokens(model, length))
        context = ContextCache(model.shape, length - p.question, model.dtype, model.devices)
        model.forward([append(context, given[: -p.question], 0)])
        case = _Case(model, p, context, given)
        for batch in p.batches:
            samples = {decoder.name: _Samples() for decoder in decoders}
            for decoder in (*decoders, *reversed(decoders)):  # twice, because clocks and neighbours drift
                _decode(case, batch, decoder, samples[decoder.name])
                done += 1
                progress("decode", done, total)
            rate = samples[DENSE].rate(batch)
            found += [_row(case, batch, name, each, rate) for name, each in samples.items()]
    return found


@dataclass
class _Samples:
    """Of one decoder: milliseconds of every timed step, keys read and keys present."""

    times: list[float] = field(default_factory=list)
    read: int = 0
    present: int = 0
    crossed: int = 0

    def rate(self, batch: int) -> float:
        """Return the tokens per second of all requests."""
        return 1000 * batch / statistics.fmean(self.times)


def _decode(case: _Case, batch: int, decoder: _Decoder, samples: _Samples) -> None:
    """Time the steps of new requests."""
    model, params, policy = case.model, case.params, decoder.policy
    pool = _pooled(case, batch, policy)
    states = [None if pool else decode_state(policy, len(case.tokens)) for _ in range(batch)]
    sequences, known = [_prefill(case, state) for state in states], list[float]()
    if pool is not None and isinstance(policy, Psa):
        for sequence in sequences:
            sequence.pooled = pool.open(sequence.cache, policy, sequence.sampling.max_tokens)
            assert sequence.pooled is not None, "the pool was made for this policy"
            sequence.pooled.join()
    now(model.device.type)
    for step in range(params.warmup + params.steps + 1):
        if step == params.warmup:
            samples.crossed -= _crossed(sequences, pool)
        for sequence in sequences:
            sequence.sample(frozenset())
        known.append(time.perf_counter())
        decode_step(model, sequences, decoder.graph_decoder)
        fault = next((sequence.fault for sequence in sequences if sequence.fault is not None), None)
        if fault is not None:
            raise fault
    samples.times += [1000 * (after - before) for before, after in pairwise(known[params.warmup :])]
    samples.crossed += _crossed(sequences, pool)
    for sequence, state in zip(sequences, states, strict=True):
        sequence.close()
        counted = sequence.pooled.counts if sequence.pooled is not None else state
        samples.present += 0 if counted is None else counted.keys_present
        samples.read += 0 if counted is None else counted.keys_read


def _crossed(sequences: abc.Sequence[Sequence], decoder: PooledDecoder | None) -> int:
    """Count the bytes that passed between host and device so far."""
    split = sum(each.attention.crossed for each in sequences if isinstance(each.attention, SplitContext))
    return split + (0 if decoder is None else decoder.pool.use().loaded * decoder.pool.slot_bytes)


def _pooled(case: _Case, batch: int, policy: DecodePolicy | None) -> PooledDecoder | None:
    """Return a decoder over a pool where the policy decodes over one."""
    share, keys = case.params.pool, len(case.tokens)
    if share is None or not isinstance(policy, Psa) or policy.why_dense(keys):
        return None
    return PooledDecoder(case.model, policy, int(share * batch * keys * case.model.token_bytes))


def _row(case: _Case, batch: int, name: str, samples: _Samples, dense: float) -> SpeedRow:
    """dense: rate of dense decoding."""
    params, length, shape = case.params, len(case.tokens), case.model.shape
    rate, read = samples.rate(batch), samples.read / samples.present if samples.present else 1.0
    keys = length + params.warmup + (params.steps + 1) / 2
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * case.model.dtype.itemsize
    p50, p99 = np.percentile(samples.times, (50, 99))
    crossed = samples.crossed / (2 * (params.steps + 1))  # every decoder takes its steps twice
    return SpeedRow(length, batch, name, rate, float(p50), float(p99), rate / dense, read, read * keys * row, crossed)


def _prefill(case: _Case, state: DecodeState | None) -> Sequence:
    """Copy the context for one request and prefill its question."""
    model, params, context, tokens = case.model, case.params, case.context, case.tokens
    room = params.question + params.warmup + params.steps + 2
    start = len(tokens) - params.question
    cache = ContextCache(model.shape, start + room, model.dtype, model.devices)
    for layer in range(model.shape.layers):
        cache.put(layer, context.k(layer), context.v(layer), context.positions(layer))
    observer, rows = (None, 1) if state is None else (QueryObserver(state, None, start), state.query_rows)
    logits = model.forward([append(cache, tokens[start:], start, outputs=rows, attention=observer)])[0][-1]
    steps = params.warmup + params.steps + 2
    return Sequence(cache, logits, len(tokens), Sampling(steps), split_context(model, cache, state, steps) or state)


def grid(rows: abc.Sequence[SpeedRow]) -> TextGrid:
    """Times in ms, shares in percent."""
    heads = ("context", "requests", "decode", "tokens/s", "× dense", "TBT p50", "p99", "keys read", "KV MiB a token",
             "MB over the bus")  # fmt: skip
    cells = [
        (
            str(row.length),
            str(row.batch),
            row.policy,
            number(row.rate, ".1f"),
            number(row.ratio, ".2f"),
            number(row.p50, ".1f"),
            number(row.p99, ".1f"),
            number(row.read, ".1f", 100),
            number(row.kv, ".1f", 2**-20),
            number(row.crossed, ".2f", 1e-6),
        )
        for row in rows
    ]
    return TextGrid(heads, tuple(cells), words=3)
