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
from tests.recompute.naive_model import Cache, NaiveModel, Row, Trace, Vector, cosine, mean

Chosen = list[list[list[int]]]
"""Blocks or tokens [layer][chunk], ascending."""


@dataclass(frozen=True)
class NaiveChunk:
    """A chunk and its digest, [layer][block] where not said otherwise.

    Attributes:
        tokens: Token ids.
        start: Position of the first token in the stitched context.
        exact: Whether the chunk is the first one.
        block: Tokens per block.
        rows: Pre-RoPE k and v [Hkv, d], [layer][token].
        mean_keys: Mean pre-RoPE keys [Hkv, d].
        local_query: Mean pre-RoPE query [Hq, d] of the tokens of the local blocks, [layer].
        alpha: Importance exponents.
        unimportance: Salience of the representatives.
        representative: Token indices.
    """

    tokens: tuple[int, ...]
    start: int
    exact: bool
    block: int
    rows: list[list[Row]]
    mean_keys: list[list[Vector]]
    local_query: list[Vector]
    alpha: list[list[float]]
    unimportance: list[list[float]]
    representative: list[list[int]]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.ceil(len(self.tokens) / self.block)

    def span(self, block: int) -> range:
        """Return the tokens of a block."""
        return range(block * self.block, min(len(self.tokens), (block + 1) * self.block))


@dataclass(frozen=True)
class NaivePlan:
    """What is kept and recomputed, [layer][chunk]."""

    kept: Chosen
    recompute: Chosen
    alive: Chosen
    padding: Chosen


def encode(model: NaiveModel, prefix: Sequence[int], tokens: tuple[int, ...], start: int, method: SamKV, block: int):
    """Encode one chunk right after the prefix, and build its digest (A.1)."""
    cache = model.empty()
    trace = model.append(cache, dict(enumerate((*prefix, *tokens))))
    n, before = len(tokens), len(prefix)
    spans = [range(first, min(n, first + block)) for first in range(0, n, block)]
    local = [before + t for span in spans[-method.local :] for t in span]
    rows, means, queries, found = [], [], [], []
    for layer in range(model.layers):
        rows.append([(trace.k[layer][before + t], trace.v[layer][before + t]) for t in range(n)])
        means.append([mean([rows[layer][t][0] for t in span]) for span in spans])
        queries.append(mean([trace.q[layer][at] for at in local]))
        found.append(analyse(model, cache, trace, layer, before, spans))
    alpha, unimportance, representative = ([each[i] for each in found] for i in range(3))
    exact = start == before
    return NaiveChunk(tokens, start, exact, block, rows, means, queries, alpha, unimportance, representative)


def analyse(
    model: NaiveModel, cache: Cache, trace: Trace, layer: int, before: int, spans: Sequence[range]
) -> tuple[list[float], list[float], list[int]]:
    """Compute alpha, unimportance and representative of each block of one layer (A.1)."""
    n = spans[-1].stop
    attention = []
    for i in range(n):
        q = model.rotate(trace.q[layer][before + i], before + i)
        shares = model.weights(q, before + i, {at: row for at, row in cache[layer].items() if at <= before + i})
        attention.append([float(shares[before + j].mean()) for j in range(i + 1)])
    salience = [sum(attention[i][j] for i in range(j + 1, n)) / max(1, n - 1 - j) for j in range(n)]
    representative = [max(span, key=lambda j: (salience[j], -j)) for span in spans]
    alpha = [exponent([(before + i + 1, attention[i][rep]) for i in range(rep + 1, n)]) for rep in representative]
    return alpha, [salience[rep] for rep in representative], representative


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Fit log A = c - alpha log x by least squares; infinite with fewer than 8 points."""
    if len(points) < 8:
        return math.inf
    x, y = [math.log(at) for at, _ in points], [math.log(value) for _, value in points]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / sum((a - x_mean) ** 2 for a in x)
    return -slope


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


def generic_query(cache: Cache, model: NaiveModel, question: Sequence[int], end: int) -> list[Vector]:
    """Compute Q_que [Hq, d] per layer over the composite cache (section 3.1)."""
    trace = model.append(cache, {end + i: token for i, token in enumerate(question)})
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
    anchor = match(query, mean([keys[b] for b in fixed(chunk, method)]))
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
    return math.ceil(sum(shares) / len(shares) * len(blocks) - 1e-9)


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


def plan(chunks: Sequence[NaiveChunk], q_que: Sequence[Vector], method: SamKV) -> NaivePlan:
    """Plan what is kept, R_l, T_l by rule 1, and the padding of rule 2 (section 3.3)."""
    kept, recompute = [], []
    for layer in select(q_que, chunks, method):
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


def fused(new: Vector, old: Vector) -> Vector:
    """Fuse rows [Hkv, d], each kv head by its own cosine. Eq. (4)"""
    out = np.zeros_like(new)
    for head in range(new.shape[0]):
        theta = min(1.0, max(0.0, cosine(new[head], old[head])))
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
            cache[layer][at] = (fused(new[0], old[0]), fused(new[1], old[1])) if method.update == "fusion" else new
        going_on = positions(chosen.alive[layer + 1]) if layer + 1 < model.layers else []
        hidden = {at: model.attend(layer, hidden[at], projected[at][0], at, cache[layer]) for at in going_on}
    for layer in range(model.layers):
        for chunk, blocks in zip(chunks, chosen.padding[layer], strict=True):
            for block in blocks:
                for token in chunk.span(block):
                    del cache[layer][chunk.start + token]
    return cache
