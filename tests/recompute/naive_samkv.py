"""SamKV in plain loops over tokens, float64, step by step as the paper tells it: the oracle of the real code.

The steps are: digest of a chunk (A.1), composite pass, personalised query (Eq. 1), Top-P (Eq. 2, 3), cross-document
filter, recompute sets, rule 1, rule 2 with padding, fusion (Eq. 4), question prefill. No code of `ragkv` runs; `SamKV`
only names the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ragkv.recompute.samkv import SamKV
from tests.recompute.naive_digest import NaiveChunk, at_places
from tests.recompute.naive_model import Cache, NaiveModel, Row, Vector, cosine, mean

Chosen = list[list[list[int]]]
"""Blocks or tokens [layer][chunk], ascending."""


@dataclass(frozen=True)
class NaivePlan:
    """What is kept and recomputed, [layer][chunk]."""

    kept: Chosen
    recompute: Chosen
    alive: Chosen
    padding: Chosen


def fixed(chunk: NaiveChunk, method: SamKV) -> list[int]:
    """Return the initial and local blocks."""
    return [b for b in range(chunk.blocks) if b < method.initial or b >= chunk.blocks - method.local]


def middle(chunk: NaiveChunk, method: SamKV) -> list[int]:
    """Return the other blocks."""
    return [b for b in range(chunk.blocks) if b not in fixed(chunk, method)]


def stored(model: NaiveModel, chunk: NaiveChunk, layer: int, block: int) -> Iterator[tuple[int, Row]]:
    """Yield position and stored row of a block's tokens, rotated to the stitched position."""
    for token in chunk.span(block):
        k, v = chunk.rows[layer][token]
        yield chunk.start + token, (model.rotate(k, chunk.start + token), v)


def context(model: NaiveModel, prefix: Sequence[int], chunks: Sequence[NaiveChunk], kept: Chosen) -> Cache:
    """Stitch the prefix and the kept blocks."""
    cache = model.empty()
    model.append(cache, dict(enumerate(prefix)))
    for layer in range(model.layers):
        for chunk, blocks in zip(chunks, kept[layer], strict=True):
            for block in blocks:
                cache[layer].update(stored(model, chunk, layer, block))
    return cache


def generic_query(cache: Cache, model: NaiveModel, question: Sequence[int], end: int, method: SamKV) -> list[Vector]:
    """Compute Q_que [Hq, d] per layer over the composite cache (section 3.1)."""
    trace = model.append(cache, {end + i: token for i, token in enumerate(question)})
    if method.compare == "after":
        return [mean([model.rotate(q, at) for at, q in layer.items()]) for layer in trace.q]
    return [mean(list(layer.values())) for layer in trace.q]


def personalised(q_que: Sequence[Vector], chunks: Sequence[NaiveChunk], one: int, method: SamKV) -> list[Vector]:
    """Compute Q^_i of chunk `one`, per layer. Eq. (1)"""
    queries = []
    for layer, query in enumerate(q_que):
        total = np.zeros_like(query)
        for other, chunk in enumerate(chunks):
            local = chunk.local_query[layer]
            if other == one:
                continue
            if method.cosine == "flat":
                total += abs(cosine(query, local)) * local
            else:
                total += np.array([abs(cosine(a, b)) * b for a, b in zip(query, local, strict=True)])
        queries.append(query + total / (len(chunks) - 1) if len(chunks) > 1 and method.bias else query)
    return queries


def match(query: Vector, key: Vector) -> float:
    """Compute <query, key>, added up over the query heads [Hq, d], each with its kv head of key [Hkv, d]."""
    group = query.shape[0] // key.shape[0]
    return sum(float(query[head] @ key[head // group]) for head in range(query.shape[0]))


def share(chunk: NaiveChunk, query: Vector, layer: int, method: SamKV) -> float:
    """Compute P of one layer. Eq. (2)"""
    blocks, keys = middle(chunk, method), chunk.mean_keys[layer]
    ends = fixed(chunk, method)
    # A mean over tokens is a mean over mean keys, each as often as its block has tokens.
    counted = ends if method.anchor == "blocks" else [b for b in ends for _ in chunk.span(b)]
    anchor = match(query, mean([keys[b] for b in counted]))
    if method.extremes == "static":
        high = match(query, keys[min(blocks, key=lambda b: chunk.alpha[layer][b])])
        low = match(query, keys[min(blocks, key=lambda b: chunk.unimportance[layer][b])])
    else:
        high, low = (pick(match(query, keys[b]) for b in blocks) for pick in (max, min))
    return (high - anchor) / (high - low) if low < anchor <= high else 0.0


def budget(chunk: NaiveChunk, queries: Sequence[Vector], method: SamKV) -> int:
    """Compute k_i = ceil(P_i M_i), P_i averaged over the stable layers. Eq. (3)"""
    blocks = middle(chunk, method)
    if not blocks:
        return 0
    shares = [share(chunk, queries[layer], layer, method) for layer in method.layers]
    exact = round(sum(shares) / len(shares) * len(blocks), 9)
    return {"up": math.ceil(exact), "nearest": math.floor(exact + 0.5), "down": math.floor(exact)}[method.rounding]


def select(q_que: Sequence[Vector], chunks: Sequence[NaiveChunk], method: SamKV) -> Chosen:
    """Select middle blocks: the best k_i of every chunk, then the best of all chunks together (section 3.2)."""
    queries = [personalised(q_que, chunks, i, method) for i in range(len(chunks))]
    budgets = [budget(chunk, queries[i], method) for i, chunk in enumerate(chunks)]
    total = sum(chunk.blocks for chunk in chunks) if method.total == "all" else sum(budgets)
    limit = math.ceil(total / len(chunks)) if len(chunks) > 1 else total
    selected: Chosen = []
    for layer in range(len(q_que)):
        candidates: list[tuple[float, int, int]] = []
        for i, chunk in enumerate(chunks):
            query, blocks = queries[i][layer], middle(chunk, method)
            values = {b: match(query, chunk.mean_keys[layer][b]) for b in blocks}
            norm = math.sqrt(float((query * query).sum()))
            low, high = (min(values.values()), max(values.values())) if blocks else (0.0, 0.0)
            for b in sorted(blocks, key=lambda b: -values[b])[: budgets[i]]:
                value = values[b] / norm if method.normalise == "query" else (values[b] - low) / (high - low)
                candidates.append((-value, i, b))
        best = sorted(candidates)[:limit]
        selected.append([sorted(b for _, j, b in best if j == i) for i in range(len(chunks))])
    return selected


def outliers(chunk: NaiveChunk, method: SamKV) -> set[int]:
    """Return the representatives whose alpha is a low outlier by PauTa, or the smallest of fewer than 11."""
    pool = [
        (chunk.alpha[layer][b], chunk.representative[layer][b])
        for layer in method.layers
        for b in middle(chunk, method)
    ]
    pool = [entry for entry in pool if math.isfinite(entry[0])]
    if len(pool) < 11:
        return {min(pool)[1]} if pool else set()
    values = [value for value, _ in pool]
    center = sum(values) / len(values)
    sigma = math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))
    return {token for value, token in pool if value < center - 3 * sigma}


def plan(model: NaiveModel, chunks: Sequence[NaiveChunk], q_que: Sequence[Vector], method: SamKV) -> NaivePlan:
    """Plan what is kept, R_l, T_l by rule 1, and the padding of rule 2 (section 3.3)."""
    kept, recompute = [], []
    compared = at_places(model, chunks, method.local) if method.compare == "after" else chunks
    for layer in select(q_que, compared, method):
        kept.append([sorted({*fixed(chunk, method), *blocks}) for chunk, blocks in zip(chunks, layer, strict=True)])
        again = []
        for chunk, blocks in zip(chunks, kept[-1], strict=True):
            base = {t for b in fixed(chunk, method) for t in chunk.span(b)}
            extra = {t for t in outliers(chunk, method) if t // chunk.block in blocks}
            again.append([] if chunk.exact else sorted(base | extra))
        recompute.append(again)
    layers, count = len(kept), len(chunks)
    alive = [
        [sorted({t for upper in recompute[layer:] for t in upper[i]}) for i in range(count)] for layer in range(layers)
    ]
    padding = [
        [sorted({t // chunks[i].block for t in alive[layer][i]} - set(kept[layer][i])) for i in range(count)]
        for layer in range(layers)
    ]
    return NaivePlan(kept, recompute, alive, padding)


def fused(new: Vector, old: Vector, method: SamKV) -> Vector:
    """Fuse rows [Hkv, d], each kv head by its own cosine, or all by one. Eq. (4)"""
    out = np.zeros_like(new)
    for head in range(new.shape[0]):
        alike = cosine(new[head], old[head]) if method.theta == "head" else cosine(new, old)
        theta = min(1.0, max(0.0, alike))
        out[head] = theta * new[head] + (1 - theta) * old[head]
    return out


def repair(
    model: NaiveModel, prefix: Sequence[int], chunks: Sequence[NaiveChunk], chosen: NaivePlan, method: SamKV
) -> Cache:
    """Recompute tokens: rule 1 says which reach a layer, rule 2 which are written. Returns the cache for the answer."""
    loaded = [[[*k, *p] for k, p in zip(*both, strict=True)] for both in zip(chosen.kept, chosen.padding, strict=True)]
    cache = context(model, prefix, chunks, loaded)

    def positions(tokens: Sequence[Sequence[int]]) -> list[int]:
        return [chunk.start + t for chunk, part in zip(chunks, tokens, strict=True) for t in part]

    ids = {chunk.start + t: token for chunk in chunks for t, token in enumerate(chunk.tokens)}
    hidden = {at: model.embed(ids[at]) for at in positions(chosen.alive[0])}
    for layer in range(model.layers):
        projected = {at: model.project(layer, hidden[at]) for at in hidden}
        for at in positions(chosen.recompute[layer]):
            _, k, v = projected[at]
            new, old = (model.rotate(k, at), v), cache[layer][at]
            if method.update == "fusion":
                new = fused(new[0], old[0], method), fused(new[1], old[1], method)
            cache[layer][at] = new
        going_on = positions(chosen.alive[layer + 1]) if layer + 1 < model.layers else []
        hidden = {at: model.attend(layer, hidden[at], projected[at][0], at, cache[layer]) for at in going_on}
    for layer in range(model.layers):
        for chunk, blocks in zip(chunks, chosen.padding[layer], strict=True):
            for block in blocks:
                for token in chunk.span(block):
                    del cache[layer][chunk.start + token]
    return cache
