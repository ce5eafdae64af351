"""`ragkv bench ttft --shape`: time to first token of every method on a model of a known shape with random weights.

From the question's token ids to the first answer token's id on the host: retrieval and tokenising are not in it,
opening the chunks and loading from their tier are. Two accountings:

    ttft          cache-ready: the chunks lie in their tier (tiered.py)
    with ingest   and the time to encode and store them, as if only one question were ever asked

`full` reads all chunks and the question in one prefill under the quickest of torch's dense attention kernels
(backends.py), which is found out first. `gated` reads from stored KV by scout where that is predicted to be quicker
(engine/reuse_policy.py), else it is `full`. Methods take turns, each with a new random question every time. Every
second turn runs backwards, because a long pass slows down the one behind it. Steps come from questions of their own,
and so do means of what was kept, recomputed and loaded.

What a method chooses on random weights means nothing, and how much it chooses may differ from a trained model: look at
what was kept before comparing times. Nobody calibrated these weights, so retrieval heads are named (fitted.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.asked import CHUNKS, STEPS, TRIAL, AskedSample, drawn
from benchmarks.backends import unless_full
from benchmarks.fitted import fitted
from benchmarks.roofline import Floors, Speeds, device_name, speeds
from benchmarks.shapes import random_tokens
from benchmarks.tiered import TieredBenchStore, tiered_bench_store
from ragkv.engine.policies import DENSE, make_prefill_policy
from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import FULL, METHODS, make_method
from ragkv.engine.reuse_policy import CHUNKS as GATE_CHUNKS
from ragkv.engine.reuse_policy import LENGTH as GATE_TOKENS
from ragkv.engine.reuse_policy import ReusePolicy
from ragkv.errors import InputError
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import make_graph_decoder
from ragkv.recompute.base import Method
from ragkv.recompute.scout import Scout
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.timing import StepTimer

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

GATED = "gated"
TIMED = (FULL, *(name for name in METHODS if name not in ("reuse-encoded", "random")), GATED)
"""Left out are methods that cost as much as reuse or as scout; they can be named."""
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class ShapeParams:
    """What is measured.

    Attributes:
        chunks: number of chunks.
        chunk_tokens: tokens per chunk.
        tier: one of TIERS.
        store: URL of the Redis server.
        methods: NAME, NAME:FIELD=VALUE,… or gated; full is always measured.
        prefills: prefill policies; every method is measured under each. Rows of several are named METHOD|POLICY.
        repeat: timed questions per method, after `warmup` untimed ones.
        split: questions per method that the steps are measured with.
        question: tokens of a question.
        prefix: tokens of the prefix.
        block: tokens of a block; 0: as for a calibrated model.
        seed: seed of all tokens.
    """

    chunks: int = 16
    chunk_tokens: int = 1024
    tier: str = "host"
    store: str = ""
    methods: tuple[str, ...] = TIMED
    prefills: tuple[str, ...] = (DENSE,)
    repeat: int = 10
    warmup: int = 2
    split: int = 3
    question: int = 32
    prefix: int = 16
    block: int = 0
    seed: int = 0


@dataclass(frozen=True)
class ShapeRow:
    """One method. Times are medians in milliseconds. A figure that could not be measured is None; `note` says why.

    Attributes:
        times: of all timed questions, in order.
        ttft: time to first token.
        with_ingest: `ttft` plus the time to encode and store the chunks, for methods that need them stored.
        speedup: full's `ttft` / this one's.
        speedup_with_ingest: full's `ttft` / this one's `with_ingest`.
        steps: medians by name.
        sequence: as in a report.
        recompute: as in a report.
        load: as in a report.
        heads: bytes of head records.
        loaded: bytes of blocks loaded from host memory or a store.
        kv: bytes of the context cache, spare room included.
        kv_live: likewise, without spare room.
        kv_share: `kv` / full's.
        floors: see roofline.py.
        of_floor: bound of the floors / `ttft`.
        note: why figures are missing; for gated, the method that was chosen.
    """

    method: str
    times: tuple[float, ...] = ()
    ttft: float | None = None
    with_ingest: float | None = None
    speedup: float | None = None
    speedup_with_ingest: float | None = None
    steps: dict[str, float] | None = None
    sequence: float | None = None
    recompute: float | None = None
    load: float | None = None
    heads: float | None = None
    loaded: float | None = None
    kv: float | None = None
    kv_live: float | None = None
    kv_share: float | None = None
    floors: Floors | None = None
    of_floor: float | None = None
    note: str = ""


@dataclass(frozen=True)
class ShapeResult:
    """All rows, and the machine and profile that they were measured with.

    Attributes:
        context: tokens of all chunks.
        block: of the profile, as are `initial`, `local`, `stable_layers` and `retrieval_heads`.
        backends: full's milliseconds under each kernel of dense attention.
        backend: the fastest of them.
        encode: milliseconds to encode all chunks.
        store: milliseconds to store all chunks.
        gate: the reuse policy of gated; None if gated was not measured.
    """

    model: str
    layers: int
    dtype: str
    device: str
    threads: int
    torch: str
    params: ShapeParams
    context: int
    block: int
    initial: int
    local: int
    stable_layers: tuple[int, ...]
    retrieval_heads: tuple[tuple[int, int], ...]
    speeds: Speeds
    backends: dict[str, float]
    backend: str
    encode: float
    store: float
    gate: ReusePolicy | None
    rows: tuple[ShapeRow, ...]


def ttft_shape(model: DecoderModel, params: ShapeParams, progress: Progress) -> ShapeResult:
    """Time every method.

    Raises:
        InputError: a length does not fit the model, or a method or tier is unknown.
        StoreError: the store failed.
    """
    p, model = params, fitted(model, params.block)
    needed = p.prefix + p.chunks * p.chunk_tokens + p.question + 1
    if (
        min(p.chunks, p.chunk_tokens, p.question, p.prefix, p.repeat, p.warmup, p.split) < 1
        or needed > model.max_positions
    ):
        raise InputError(f"{needed} tokens of context, question and answer; {model.name} reads {model.max_positions}")
    names = tuple(dict.fromkeys((FULL, *p.methods)))
    cases = _cases(model, names, p.prefills)
    prefiller = Prefiller(model, random_tokens(model, p.prefix, p.seed), graph_decoder=make_graph_decoder(model))
    chunks = [drawn(model, p.chunk_tokens, p.seed, CHUNKS + i) for i in range(p.chunks)]
    trial = [drawn(model, GATE_TOKENS, p.seed, TRIAL + i) for i in range(GATE_CHUNKS if GATED in names else 0)]
    at = speeds(model.device, model.dtype)
    with tiered_bench_store(model, p.tier, p.store) as stored:
        encode, store = _fill(prefiller, stored, chunks, trial, progress)
        asked, gate = AskedSample(prefiller, stored, chunks, p.question, p.seed), None
        backends = asked.prefer_best(p.warmup)
        if trial:
            scout = _scout(model)
            gate = asked.gate(scout, trial)
            chosen = scout if asked.opens(gate, scout) else None
            cases = {name: replace(case, method=chosen) if case.gated else case for name, case in cases.items()}
        rows = _rows(asked, p, cases, gate, at, encode + store, progress)
    return _result(model, p, _Measured(at, backends, encode, store, gate, rows))


def _scout(model: DecoderModel) -> Scout:
    made = make_method("scout", model)
    if not isinstance(made, Scout):
        raise TypeError("`make_method` returned no Scout")
    return made


@dataclass(frozen=True)
class _Measured:
    """What `ShapeResult` says beyond model and parameters; the fields have its names."""

    speeds: Speeds
    backends: dict[str, float]
    encode: float
    store: float
    gate: ReusePolicy | None
    rows: tuple[ShapeRow, ...]


def _result(model: DecoderModel, params: ShapeParams, measured: _Measured) -> ShapeResult:
    profile = model.profile
    return ShapeResult(
        model=model.name,
        layers=model.shape.layers,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(model),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        params=replace(params, store=params.store.partition(":")[0]),  # a URL may hold a password
        context=params.chunks * params.chunk_tokens,
        block=profile.block,
        initial=profile.initial,
        local=profile.local,
        stable_layers=profile.stable_layers,
        retrieval_heads=profile.retrieval_heads,
        backend=min(measured.backends, key=lambda name: measured.backends[name], default=""),
        **vars(measured),
    )


def _fill(
    prefiller: Prefiller,
    stored: TieredBenchStore,
    chunks: Sequence[tuple[int, ...]],
    trial: Sequence[tuple[int, ...]],
    progress: Progress,
) -> tuple[float, float]:
    """Encode and store everything. Returns the milliseconds to encode and to store `chunks`, without `trial`."""
    prefiller.encode(chunks[0])  # the first call chooses and compiles kernels
    encode = store = 0.0
    for number, tokens in enumerate((*trial, *chunks)):
        timer = StepTimer(prefiller.model.device)
        with timer.step("encode"):
            kv = prefiller.encode(tokens)
        with timer.step("store"):
            stored.put(kv)
        if number >= len(trial):
            encode, store = encode + timer.elapsed("encode"), store + timer.elapsed("store")
        progress("encode", number + 1, len(trial) + len(chunks))
    stored.fill_tier()
    return encode, store


@dataclass(frozen=True)
class _Case:
    """A method, None for a full prefill, under a prefill policy, None for dense. gated: the gate chose the method."""

    method: Method | None
    policy: PrefillPolicy | None
    gated: bool = False


def _cases(model: DecoderModel, names: Sequence[str], prefills: Sequence[str]) -> dict[str, _Case]:
    """Return every method under every policy, by the name of its row; full under the first policy is the first."""
    policies = {policy: make_prefill_policy(policy, model.profile) for policy in dict.fromkeys(prefills)}
    methods = {name: None if name in (FULL, GATED) else make_method(name, model) for name in names}
    return {
        name if len(policies) == 1 else f"{name}|{policy}": _Case(method, made, name == GATED)
        for name, method in methods.items()
        for policy, made in policies.items()
    }


def _rows(
    asked: AskedSample,
    params: ShapeParams,
    cases: dict[str, _Case],
    gate: ReusePolicy | None,
    at: Speeds,
    ingest: float,
    progress: Progress,
) -> tuple[ShapeRow, ...]:
    """ingest: milliseconds to encode and store the chunks."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    scout = _scout(asked.prefiller.model)
    turns = params.warmup + params.repeat
    running = list(cases)
    for turn in range(turns):
        for name in running[:: 1 if turn % 2 else -1]:
            case = cases[name]
            if case.gated and gate is not None:
                elapsed = unless_full(partial(asked.gated, gate, scout, case.policy))
            else:
                elapsed = unless_full(partial(asked.first_token, case.method, case.policy))
            if elapsed is None:
                running.remove(name)
            elif turn >= params.warmup:
                times[name].append(elapsed)
        progress("ask", turn + 1, turns)
    rows = []
    for name, case in cases.items():
        split = partial(_split, asked, params, name, case, at)
        row = unless_full(split) if name in running else None
        note = OUT_OF_MEMORY if row is None else "" if not case.gated else FULL if case.method is None else "scout"
        rows.append(replace(row or ShapeRow(name), times=tuple(times[name]) if row else (), note=note))
    return tuple(_compared(row, rows[0], 0.0 if cases[row.method].method is None else ingest) for row in rows)


def _split(asked: AskedSample, params: ShapeParams, name: str, case: _Case, at: Speeds) -> ShapeRow:
    """Measure everything but the time to first token."""
    found = [asked.split(case.method, at, case.policy) for _ in range(params.split)]
    return ShapeRow(
        name,
        steps={step: statistics.median(each.steps[step] for each in found) for step in STEPS},
        sequence=statistics.fmean(each.sequence for each in found),
        recompute=statistics.fmean(each.recompute for each in found),
        load=statistics.fmean(each.load for each in found),
        heads=statistics.fmean(each.heads for each in found),
        loaded=statistics.fmean(each.loaded for each in found),
        kv=statistics.fmean(each.kv for each in found),
        kv_live=statistics.fmean(each.kv_live for each in found),
        floors=found[-1].floors,
    )


def _compared(row: ShapeRow, full: ShapeRow, ingest: float) -> ShapeRow:
    """Return the row with what follows from its times. ingest: milliseconds; 0 for methods without stored chunks."""
    if not row.times:
        return row
    middle = statistics.median(row.times)
    base = statistics.median(full.times) if full.times else None
    return replace(
        row,
        ttft=middle,
        with_ingest=middle + ingest,
        speedup=None if base is None else base / middle,
        speedup_with_ingest=None if base is None else base / (middle + ingest),
        kv_share=None if row.kv is None or not full.kv else row.kv / full.kv,
        of_floor=None if row.floors is None else row.floors.bound / middle,
    )
