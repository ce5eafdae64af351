"""CritiPrefill over several layers against a naive reference: loops over segments, blocks and rows, float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ragkv.sparse.base import SparsePrefill
from ragkv.sparse.critiprefill import CritiPrefill
from tests.sparse.test_critiprefill import random_rows

SCALE = 0.3
Layer = tuple[Tensor, Tensor, Tensor]
"""q [T, Hq, d], k and v [n, Hkv, d]."""


def make_layers(count: int, rows: int, keys: int) -> list[Layer]:
    return [
        (random_rows(rows, 4, 10 + i), random_rows(keys, 2, 20 + i), random_rows(keys, 2, 30 + i)) for i in range(count)
    ]


def raw_score(queries: Tensor, keys: Tensor) -> float:
    """Compute max(mean(Qmax Kmax, Qmin Kmax), mean(Qmax Kmin, Qmin Kmin)) of one head's [m, d] and a block's [b, d]."""
    products = {}
    for name, pick in (("max", max), ("min", min)):
        key = [pick(column) for column in zip(*keys.tolist(), strict=True)]
        for other, choose in (("max", max), ("min", min)):
            query = [choose(column) for column in zip(*queries.tolist(), strict=True)]
            products[other, name] = sum(a * b for a, b in zip(query, key, strict=True))
    high = (products["max", "max"] + products["min", "max"]) / 2
    low = (products["max", "min"] + products["min", "min"]) / 2
    return max(high, low)


def segments(start: int, stop: int, size: int) -> list[range]:
    """Split positions [start, stop) into segments, which are counted from position 0."""
    return [range(max(start, s), min(stop, s + size)) for s in range(start // size * size, stop, size)]


def shares(layer: Layer, start: int, span: range, blocks: int, p: CritiPrefill, head: int) -> dict[int, float]:
    """Compute the softmax over the blocks that lie wholly before a segment, for one kv head."""
    q, k, _ = layer
    raw = {}
    for block in range(blocks):
        if min(k.shape[0], (block + 1) * p.block) <= span.start:
            rows = k[block * p.block : (block + 1) * p.block, head]
            own = [raw_score(q[span.start - start : span.stop - start, h], rows) for h in (2 * head, 2 * head + 1)]
            raw[block] = sum(own) / 2 * (SCALE if p.scaled else 1)
    total = sum(math.exp(value) for value in raw.values())
    return {block: math.exp(value) / total for block, value in raw.items()}


def attention(layer: Layer, start: int, position: int, head: int, keys: set[int]) -> Tensor:
    """Compute the attention [d] of one row and query head over some keys."""
    q, k, v = layer
    seen = sorted(key for key in keys if key <= position)
    weights = [math.exp(float(q[position - start, head] @ k[key, head // 2]) * SCALE) for key in seen]
    return sum(w * v[key, head // 2] for w, key in zip(weights, seen, strict=True)) / sum(weights)


def naive(layers: list[Layer], start: int, p: CritiPrefill) -> list[Tensor]:
    """Run every layer; the scores of a layer are fused with the fused scores of the layer before."""
    outs = []
    before: dict[tuple[int, range], dict[int, float]] = {}
    for number, layer in enumerate(layers):
        q, k, _ = layer
        n, blocks, out = k.shape[0], -(-k.shape[0] // p.block), torch.zeros_like(q)
        spans = segments(start, start + q.shape[0], p.segment)
        for head in range(2):
            for span in spans:
                keys = set(range(n))
                if number >= p.skip and span.start >= p.threshold and span != spans[-1]:
                    now = shares(layer, start, span, blocks, p, head)
                    old = before.get((head, span), now)
                    fused = {b: p.fusion * value + (1 - p.fusion) * old[b] for b, value in now.items()}
                    before[head, span] = fused
                    best = sorted(fused, key=lambda b: -fused[b])[: p.budget // p.block]
                    others = [b for b in range(blocks) if b not in now]
                    keys = {key for b in (*best, *others) for key in range(b * p.block, min(n, (b + 1) * p.block))}
                for position in span:
                    for h in (2 * head, 2 * head + 1):
                        out[position - start, h] = attention(layer, start, position, h, keys)
        outs.append(out)
    return outs


def real(layers: list[Layer], start: int, p: CritiPrefill) -> list[Tensor]:
    rows, n = layers[0][0].shape[0], layers[0][1].shape[0]
    sparse = SparsePrefill(p.start(), n)
    q_pos, k_pos = torch.arange(start, start + rows), torch.arange(n)
    return [sparse(i, q, k, v, q_pos, k_pos, scale=SCALE) for i, (q, k, v) in enumerate(layers)]


@pytest.mark.parametrize("start", [0, 16, 13])
@pytest.mark.parametrize(("fusion", "scaled"), [(0.75, True), (0.75, False), (0.25, True), (0.25, False), (1.0, True)])
def test_outputs_of_all_layers_are_those_of_the_reference(start, fusion, scaled):
    params = CritiPrefill(segment=8, block=2, budget=6, fusion=fusion, skip=1, threshold=0, scaled=scaled)
    layers = make_layers(4, 45 - start, 45)
    for found, wanted in zip(real(layers, start, params), naive(layers, start, params), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_layer_fusion_changes_what_is_read():
    layers = make_layers(3, 45, 45)
    outs = [real(layers, 0, CritiPrefill(8, 2, 6, fusion=x, skip=0, threshold=0))[-1] for x in (1.0, 0.75, 0.25)]
    assert (outs[0] - outs[1]).abs().max() > 1e-2
    assert (outs[1] - outs[2]).abs().max() > 1e-2


def test_by_default_the_current_layer_weighs_three_quarters_and_the_first_layer_is_dense():
    assert (CritiPrefill().fusion, CritiPrefill().skip) == (0.75, 1)
    assert (CritiPrefill().segment, CritiPrefill().block, CritiPrefill().budget) == (512, 32, 1024)
