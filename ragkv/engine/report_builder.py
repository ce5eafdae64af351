"""Turns what a request did into its report. Arithmetic only; report.py defines the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.detokenizer import Completion
from ragkv.engine.policies import DENSE
from ragkv.engine.prefill_state import PrefilledContext
from ragkv.engine.request import Request
from ragkv.engine.speculation import speculation_report
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.pooled_decode import PooledRequest
from ragkv.model.execution.split_context import SplitContext
from ragkv.recompute.base import Blocks, different_layers, recomputed_tokens
from ragkv.report import (
    NOT_QUALIFIED,
    ByteCounts,
    CacheReport,
    ChunkReport,
    DecodeReport,
    Fallback,
    PoolReport,
    PrefillReport,
    Ratios,
    Report,
    Selection,
    TierHits,
    Timings,
    TokenCounts,
)
from ragkv.sparse.psa import PsaState
from ragkv.types import Hit

NO_STEP = "no step was decoded: the prefill gives the first token"
TIMED = ("retrieve", "open", "plan", "load", "repair", "prefill", "decode")


def build_report(model: DecoderModel, request: Request, completion: Completion) -> Report:
    """Build the report of a request whose decoding has ended.

    Args:
        model: The model that answered.
        request: The request, its session as the question left it.
        completion: The answer as it was decoded.
    """
    session, context, timer = request.session, request.context, request.timer
    left_out, sources, hits = session.left_out, session.sources, [*session.hits, *session.left_out]
    plan = context.plan  # no plan: all was prefilled, nothing looked up
    new = [0 if i < context.cached_chunks else len(hit.chunk.tokens) for i, hit in enumerate(hits)]
    again = [*recomputed_tokens(plan.recompute), *(0.0 for _ in left_out)] if plan else [float(n) for n in new]
    layers = different_layers(plan.kept) if plan else []
    chunks = tuple(_chunk(model, i, hit, layers, again[i]) for i, hit in enumerate(hits))
    size = sum(chunk.tokens for chunk in chunks)
    kept, read = _kept_tokens(model, session.hits, layers), _byte_counts(model, size, sources)
    tiers = Counter(s.tier for s in sources if s.hit)
    found = tiers.total()
    prefill, prefilling = _prefilling(context)
    decode, decoding = _decoded(model, request, completion)
    return Report(
        method=session.method,
        prefill=prefill,
        decode=decode,
        model=model.name,
        tokens=TokenCounts(
            context=size,
            kept=kept,
            recomputed=sum(again),
            question=len(request.question_tokens),
            generated=len(completion.tokens),
            history=0.0 if session.replayed else context.cached_tokens,
            prefilled=context.prefilled_tokens + session.replayed,
        ),
        ratios=Ratios(
            kept / size,
            sum(again) / size,
            (read.heads + read.loaded) / read.context_kv,
            found / len(session.hits),
        ),
        cache=CacheReport(len(session.hits), TierHits(**tiers), len(sources) - found, _fallbacks(request)),
        bytes=read,
        prefilling=prefilling,
        decoding=replace(decoding, speculation=speculation_report(request)),
        timings_ms=Timings(**{name: timer.elapsed(name) for name in TIMED}, ttft=completion.ttft, total=timer.total()),
        chunks=chunks,
        removed_turns=session.removed,
        selection=_selection(request, model),
    )


def _byte_counts(model: DecoderModel, tokens: int, sources: Sequence[StoredChunk]) -> ByteCounts:
    """Count the bytes that were read of chunks with so many tokens."""
    layers = sum((source.loaded_layers for source in sources), np.zeros(model.shape.layers, np.int64))
    return ByteCounts(
        context_kv=tokens * model.token_bytes,
        heads=sum(source.head_bytes for source in sources),
        loaded=int(layers.sum()),
        windows=sum(int(layers[layer]) for layer, kind in enumerate(model.kinds) if kind.window is not None),
        states=sum(source.state_bytes for source in sources),
    )


def _selection(request: Request, model: DecoderModel) -> Selection:
    method, context = request.method.method, request.context
    promised = context.plan.promised if context.plan else None
    measured = model.profile.agreement[1] if model.profile.agreement else None
    return Selection(method.evidence if method else (), len(context.looks), promised, measured)


def _fallbacks(request: Request) -> tuple[Fallback, ...]:
    session = request.session
    if request.reuse_refused:
        return tuple(Fallback(hit.chunk.id, NOT_QUALIFIED) for hit in session.hits)
    pairs = zip(session.hits, session.sources, strict=False)
    return tuple(Fallback(hit.chunk.id, source.fallback) for hit, source in pairs if source.fallback)


def _prefilling(context: PrefilledContext) -> tuple[str, PrefillReport]:
    """Return the name of the policy that was at work, and what it read."""
    sparse = context.sparse
    if sparse is None:
        return DENSE, PrefillReport(None, None, context.dense.prefill)
    name, read, dense = sparse.state.name, sparse.pairs_read, sparse.dense_pairs
    why = "" if read < dense else f"{name} read everything: {sparse.state.read_all}"
    return name if sparse.selected else DENSE, PrefillReport(read, dense, why)


def _decoded(model: DecoderModel, request: Request, completion: Completion) -> tuple[str, DecodeReport]:
    """Return the name of the decode policy that was at work, and what it read."""
    pooled, paged, attention = request.sequence.pooled, request.sequence.paged, request.sequence.attention
    if pooled is not None:
        return _pooled_decoding(pooled, completion)
    in_place = 0.0 if paged is None else sum(paged.rows) / model.shape.layers
    decode, decoding = _decoding(request.context, completion, in_place)
    in_host = attention.in_host / model.shape.layers if isinstance(attention, SplitContext) else 0.0
    return decode, replace(decoding, in_host=in_host)


def _decoding(context: PrefilledContext, completion: Completion, in_place: float) -> tuple[str, DecodeReport]:
    """Return the name of the policy that was at work, and what it read. in_place: keys that are not in the cache."""
    state, steps, ended = context.decoding, completion.steps, "stop" if completion.stopped else "length"
    if state is not None and state.key_counts:
        lists = sum(each.read.shape[0] for each in state.key_counts)
        read, present = state.keys_read / lists, state.keys_present / lists
        why = "" if read < present else f"{state.name} read everything: {state.read_all}"
        report = DecodeReport(steps, read, present, state.fetched, ended, why)
        return state.name if state.has_selected else DENSE, report
    lengths = context.cache.lengths
    tokens = len(completion.log_probabilities) - 1  # the first is sampled from the logits of the prefill
    present = in_place + sum(lengths) / len(lengths) - (tokens - 1) / 2 if steps else 0.0
    why = context.dense.decode or NO_STEP
    return DENSE, DecodeReport(steps, present, present, 0, ended, why, in_place=in_place)


def _pooled_decoding(pooled: PooledRequest, completion: Completion) -> tuple[str, DecodeReport]:
    """Return the same for an answer that was decoded over the pool."""
    counts, shape, size = pooled.counts, pooled.cache.shape, pooled.params.block
    lists, ended = counts.steps * shape.layers * shape.kv_heads, "stop" if completion.stopped else "length"
    tokens = counts.loaded * size / (shape.layers * shape.kv_heads)
    pool = PoolReport(counts.read, counts.hits, counts.loaded, tokens)
    if not lists:
        return DENSE, DecodeReport(0, 0.0, 0.0, 0, ended, NO_STEP, pool)
    read, present = counts.keys_read / lists, counts.keys_present / lists
    why = "" if read < present else f"{PsaState.name} read everything: {PsaState.read_all}"
    return PsaState.name, DecodeReport(counts.steps, read, present, 0, ended, why, pool)


_Layers = Sequence[tuple[int, Sequence[Blocks]]]
"""What different layers keep, the blocks of each chunk, with the number of layers that keep the same; empty without a
plan, which keeps everything."""


def _chunk(model: DecoderModel, i: int, hit: Hit, layers: _Layers, again: float) -> ChunkReport:
    tokens, block = len(hit.chunk.tokens), model.profile.block
    blocks = -(-tokens // block)
    counts, total = [0 if layers else 1] * blocks, sum(times for times, _ in layers) or 1
    for times, layer in layers:
        for kept_block in layer[i] if i < len(layer) else ():  # those left out are in no plan
            counts[kept_block] += times
    kept = tuple(count / total for count in counts)
    return ChunkReport(hit.chunk.id, hit.chunk.document_id, hit.chunk.title, tokens, blocks, kept, again)


def _kept_tokens(model: DecoderModel, hits: Sequence[Hit], layers: _Layers) -> float:
    """Mean over layers of the tokens of kept blocks, a partial last block by its real tokens."""
    sizes, block = [len(hit.chunk.tokens) for hit in hits], model.profile.block
    if not layers:
        return float(sum(sizes))
    kept = [
        times * sum(min(block, size - b * block) for size, blocks in zip(sizes, layer, strict=True) for b in blocks)
        for times, layer in layers
    ]
    return sum(kept) / sum(times for times, _ in layers)
