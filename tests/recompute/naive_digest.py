"""Encoding and digest of one chunk in plain loops over tokens, float64 (section 3.1, appendix A.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.recompute.naive_model import Cache, NaiveModel, Row, Trace, Vector, mean


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


def encode(
    model: NaiveModel, prefix: Sequence[int], tokens: tuple[int, ...], start: int, local: int, block: int
) -> NaiveChunk:
    """Encode one chunk right after the prefix, and build its digest (A.1)."""
    cache = model.empty()
    trace = model.append(cache, dict(enumerate((*prefix, *tokens))))
    n, before = len(tokens), len(prefix)
    spans = [range(first, min(n, first + block)) for first in range(0, n, block)]
    local_rows = [before + t for span in spans[-local:] for t in span]
    rows, means, queries, found = [], [], [], []
    for layer in range(model.layers):
        rows.append([(trace.k[layer][before + t], trace.v[layer][before + t]) for t in range(n)])
        means.append([mean([rows[layer][t][0] for t in span]) for span in spans])
        queries.append(mean([trace.q[layer][at] for at in local_rows]))
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


def at_places(model: NaiveModel, chunks: Sequence[NaiveChunk], local: int) -> list[NaiveChunk]:
    """Rotate mean keys to the middle of their blocks, and local queries to the middle of the local blocks."""
    rotated = []
    for chunk in chunks:
        spans = [chunk.span(b) for b in range(chunk.blocks)]
        middles = [chunk.start + (span[0] + span[-1]) // 2 for span in spans]
        keys = [[model.rotate(k, at) for k, at in zip(layer, middles, strict=True)] for layer in chunk.mean_keys]
        middle = chunk.start + (spans[max(0, len(spans) - local)][0] + len(chunk.tokens) - 1) // 2
        queries = [model.rotate(query, middle) for query in chunk.local_query]
        rotated.append(replace(chunk, mean_keys=keys, local_query=queries))
    return rotated
