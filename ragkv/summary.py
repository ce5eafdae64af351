"""From what a request did to its report. Arithmetic only; the report's contract is report.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ragkv.model import DecoderModel
from ragkv.recompute.base import Plan, recomputed
from ragkv.report import Bytes, Cache, ChunkReport, Fallback, Hits, Ratios, Report, Timings, Tokens
from ragkv.sources import StoredChunk
from ragkv.types import Hit
from ragkv.watch import Watch

TIMED = ("retrieve", "open", "plan", "load", "repair", "prefill", "decode")


def summarise(
    model: DecoderModel,
    method: str,
    hits: Sequence[Hit],
    sources: Sequence[StoredChunk],
    plan: Plan | None,
    question: int,
    generated: int,
    ttft: float,
    watch: Watch,
    refused: str = "",
) -> Report:
    """plan None: everything was prefilled, nothing looked up. ttft in milliseconds. refused: why no chunk's stored KV
    was used although the method asked for would have."""
    again = recomputed(plan.recompute) if plan else [float(len(hit.chunk.tokens)) for hit in hits]
    chunks = tuple(_chunk(model, i, hit, plan, again[i]) for i, hit in enumerate(hits))
    context = sum(chunk.tokens for chunk in chunks)
    kept = _kept_tokens(model, hits, plan)
    row = model.token_bytes
    heads, loaded = sum(s.head_bytes for s in sources), sum(s.loaded_bytes for s in sources)
    tiers = Counter(s.tier for s in sources if s.hit)
    found = tiers.total()
    fallbacks = tuple(
        Fallback(hit.chunk.id, source.fallback) for hit, source in zip(hits, sources, strict=False) if source.fallback
    )
    if refused:
        fallbacks = tuple(Fallback(hit.chunk.id, refused) for hit in hits)
    return Report(
        method=method,
        prefill="dense",
        decode="dense",
        model=model.name,
        tokens=Tokens(context, kept, sum(again), question, generated),
        ratios=Ratios(kept / context, sum(again) / context, (heads + loaded) / (context * row), found / len(hits)),
        cache=Cache(len(hits), Hits(**tiers), len(sources) - found, fallbacks),
        bytes=Bytes(context * row, heads, loaded),
        timings_ms=Timings(**{name: watch.spent(name) for name in TIMED}, ttft=ttft, total=watch.total()),
        chunks=chunks,
    )


def _chunk(model: DecoderModel, i: int, hit: Hit, plan: Plan | None, again: float) -> ChunkReport:
    tokens, block = len(hit.chunk.tokens), model.profile.block
    blocks = -(-tokens // block)
    if plan is None:
        kept: tuple[float, ...] = (1.0,) * blocks
    else:
        kept = tuple(sum(b in layer[i] for layer in plan.kept) / len(plan.kept) for b in range(blocks))
    return ChunkReport(hit.chunk.id, hit.chunk.document_id, hit.chunk.title, tokens, blocks, kept, again)


def _kept_tokens(model: DecoderModel, hits: Sequence[Hit], plan: Plan | None) -> float:
    """Mean over layers of the tokens of kept blocks, a partial last block by its real tokens."""
    sizes, block = [len(hit.chunk.tokens) for hit in hits], model.profile.block
    if plan is None:
        return float(sum(sizes))
    per_layer = [
        sum(min(block, size - b * block) for size, blocks in zip(sizes, layer, strict=True) for b in blocks)
        for layer in plan.kept
    ]
    return sum(per_layer) / len(per_layer)
