"""What a token costs in a whole model, by length of the context and number of requests that decode together.

The context is prefilled once and copied for every request; each reads a question of `question` tokens, from which its
policy's state learns, and then decodes `steps` tokens, all requests in one forward a step. Stop tokens do not stop.
Time between tokens is that of a step, as every request of the batch meets it. Cache-ready: nothing of prefill, of the
question or of a store is in these times. The dense rows are the model's own loop over torch's fused attention.
"""

from __future__ import annotations

import statistics
from collections import abc
from dataclasses import dataclass

import numpy as np
import torch

from ragkv.bench.decode import Named, now
from ragkv.bench.grid import TextGrid, number
from ragkv.bench.prefill import Tokens
from ragkv.bench.quality import Progress
from ragkv.engine.generation import Sampling, Sequence, decode_step
from ragkv.engine.policies import DENSE
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder, make_graph_decoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.base import DecodePolicy, DecodeState, QueryObserver

RECORDED = "dense, recorded"


@dataclass(frozen=True)
class SpeedParams:
    """lengths: keys of the contexts, question included · batches: requests that decode together · steps: timed, after
    `warmup` untimed ones · question: tokens that the policies' states learn from."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    steps: int = 32
    warmup: int = 3
    question: int = 24


@dataclass(frozen=True)
class SpeedRow:
    """rate: tokens a second, of all requests · p50, p99: milliseconds between the tokens of one · ratio: rate over
    dense decoding's, same length and batch · read: keys read / keys there · kv: bytes of K and V that a token of one
    request reads, over layers."""

    length: int
    batch: int
    policy: str
    rate: float
    p50: float
    p99: float
    ratio: float
    read: float
    kv: float


@torch.inference_mode()
def measure(
    model: DecoderModel, params: SpeedParams, policies: abc.Sequence[Named], progress: Progress, tokens: Tokens
) -> list[SpeedRow]:
    """Dense decoding, by recorded steps, too, where the model is on a GPU that they can be recorded for (steps.py), and
    every policy, at every length and batch.

    Raises InputError for a length that the model does not read.
    """
    p, found = params, list[SpeedRow]()
    longest = max(p.lengths) + p.warmup + p.steps
    if min(p.lengths) <= p.question or longest > model.max_positions:
        raise InputError(
            f"{longest} tokens of context and answer; {model.name} reads {model.max_positions}, and a context has more "
            f"than the {p.question} of its question"
        )
    steps = make_graph_decoder(model)
    recorded: list[tuple[str, DecodePolicy | None, GraphDecoder | None]] = [(RECORDED, None, steps)] if steps else []
    ways = [(DENSE, None, None), *recorded, *((name, decoder, None) for name, decoder in policies)]
    total, done = len(p.lengths) * len(p.batches) * len(ways), 0
    for length in p.lengths:
        given = list(tokens(model, length))
        context = ContextCache(model.shape, length - p.question, model.dtype, model.devices)
        model.forward([append(context, given[: -p.question], 0)])
        for batch in p.batches:
            dense: float | None = None
            for name, decoder, by in ways:
                row = _row(model, p, context, given, batch, name, decoder, by, dense)
                dense = dense or row.rate
                found.append(row)
                done += 1
                progress("decode", done, total)
    return found


def _row(
    model: DecoderModel,
    params: SpeedParams,
    context: ContextCache,
    given: abc.Sequence[int],
    batch: int,
    name: str,
    decoder: DecodePolicy | None,
    steps: GraphDecoder | None,
    dense: float | None,
) -> SpeedRow:
    length, shape = len(given), model.shape
    states = [None if decoder is None or not decoder.applies(length) else decoder.start() for _ in range(batch)]
    runs = [_begin(model, params, context, given, state) for state in states]
    times = []
    for step in range(params.warmup + params.steps):
        start = now(model.device.type)
        for run in runs:
            run.sample(frozenset())
        decode_step(model, runs, steps)
        if step >= params.warmup:
            times.append(1000 * (now(model.device.type) - start))
        fault = next((run.fault for run in runs if run.fault is not None), None)
        if fault is not None:
            raise fault
    rate = 1000 * batch / statistics.fmean(times)
    present = sum(state.keys_present for state in states if state is not None)
    read = sum(state.keys_read for state in states if state is not None) / present if present else 1.0
    keys = length + params.warmup + (params.steps + 1) / 2
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    p50, p99 = np.percentile(times, (50, 99))
    return SpeedRow(length, batch, name, rate, float(p50), float(p99), rate / (dense or rate), read, read * keys * row)


def _begin(
    model: DecoderModel, params: SpeedParams, context: ContextCache, given: abc.Sequence[int], state: DecodeState | None
) -> Sequence:
    """A request of its own, its question read."""
    room = params.question + params.warmup + params.steps
    start = len(given) - params.question
    cache = ContextCache(model.shape, start + room, model.dtype, model.devices)
    for layer in range(model.shape.layers):
        cache.put(layer, context.k(layer), context.v(layer), context.positions(layer))
    attention, rows = (None, 1) if state is None else (QueryObserver(state, None, start), state.query_rows)
    logits = model.forward([append(cache, given[start:], start, outputs=rows, attention=attention)])[0][-1]
    return Sequence(cache, logits, len(given), Sampling(params.warmup + params.steps + 1), state)


def grid(rows: abc.Sequence[SpeedRow]) -> TextGrid:
    """Times in ms, shares in percent."""
    heads = ("context", "requests", "decode", "tokens/s", "× dense", "TBT p50", "p99", "keys read", "KV MiB a token")
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
        )
        for row in rows
    ]
    return TextGrid(heads, tuple(cells), words=3)
