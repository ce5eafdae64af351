"""CacheBlend against a full prefill: the tokens it chooses, and its results if it chooses all tokens."""

from dataclasses import replace

import pytest
import torch

from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.recompute.base import recomputed_tokens
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.reuse import Reuse
from tests import tiny
from tests.engine.test_prefill import CHUNKS, EXACT, PREFIX, full, reader, sparse

SIZE = sum(map(len, CHUNKS))


def dense_rows(r, layer):
    """Return K (rotated) and V of the chunk tokens in one layer of a full prefill."""
    whole = [*PREFIX, *(t for chunk in CHUNKS for t in chunk)]
    cache = ContextCache(r.model.shape, len(whole), r.model.dtype)
    r.model.forward([append(cache, whole, 0, outputs=0, capture=Capture())])
    return cache.k(layer)[len(PREFIX) :], cache.v(layer)[len(PREFIX) :]


def stored_rows(r, layer):
    """Return the same rows of chunks that were encoded alone, at their positions."""
    context = sparse(r, Reuse(4))
    at = context.cache.positions(layer)
    order = at.argsort()[len(PREFIX) : len(PREFIX) + SIZE]
    return context.cache.k(layer)[order], context.cache.v(layer)[order]


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mode", ["shared", "isolated"])
def test_a_ratio_of_one_is_a_full_prefill(kind, mode):
    r = reader(kind, mode)
    torch.testing.assert_close(sparse(r, CacheBlend(4, ratio=1.0)).logits, full(r), **EXACT)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("deviation", ["kv", "k", "v"])
def test_the_recomputed_tokens_are_those_that_differ_most_at_the_check_layer(layer, deviation):
    r = reader()
    squares = [(a - b).square().sum((1, 2)) for a, b in zip(dense_rows(r, layer), stored_rows(r, layer), strict=True)]
    difference = {"kv": squares[0] + squares[1], "k": squares[0], "v": squares[1]}[deviation]
    count = 20
    best = sorted(difference.argsort(descending=True)[:count].tolist())
    plan = sparse(r, CacheBlend(4, ratio=count / SIZE, layer=layer, deviation=deviation)).plan
    starts = [0, len(CHUNKS[0]), len(CHUNKS[0]) + len(CHUNKS[1])]
    for number in range(4):
        again = [s + t for s, tokens in zip(starts, plan.recompute[number], strict=True) for t in tokens]
        assert again == (list(range(len(CHUNKS[0]), SIZE)) if number <= layer else best)
    assert min(best) >= len(CHUNKS[0]), "the first chunk is exact"
    assert len({id(tokens) for tokens in plan.recompute}) == 2, "layers with the same tokens share them"


def test_rows_up_to_the_check_layer_equal_those_of_a_full_prefill():
    r = reader()
    context = sparse(r, CacheBlend(4, ratio=0.1, layer=1))
    for layer in (0, 1):
        order = context.cache.positions(layer).argsort()[len(PREFIX) : len(PREFIX) + SIZE]
        torch.testing.assert_close(context.cache.k(layer)[order], dense_rows(r, layer)[0], **EXACT)
        torch.testing.assert_close(context.cache.v(layer)[order], dense_rows(r, layer)[1], **EXACT)
    assert (context.logits - full(r)).abs().max() > 1e-3


def test_more_recomputed_tokens_reduce_the_error():
    r = reader()
    errors = [float((sparse(r, CacheBlend(4, ratio=x)).logits - full(r)).abs().max()) for x in (0.0, 0.3, 1.0)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-10


def test_gradual_filtering_drops_tokens_layer_by_layer():
    r = reader()
    plan = sparse(r, CacheBlend(4, ratio=0.1, gradual=(0.4, 0.2))).plan
    counts = [sum(map(len, layer)) for layer in plan.recompute]
    free = SIZE - len(CHUNKS[0])
    assert counts == [free, free, -(-4 * SIZE // 10), -(-2 * SIZE // 10)]
    for earlier, later in zip(plan.recompute[1:], plan.recompute[2:], strict=False):
        assert all(set(b) <= set(a) for a, b in zip(earlier, later, strict=True))
    exact = sparse(r, CacheBlend(4, ratio=1.0, gradual=(1.0,)))
    torch.testing.assert_close(exact.logits, full(r), **EXACT)


def test_a_single_exact_chunk_is_not_recomputed():
    r = reader()
    context = sparse(r, CacheBlend(4), CHUNKS[:1])
    assert not any(any(layer) for layer in context.plan.recompute)
    torch.testing.assert_close(context.logits, full(r, CHUNKS[:1]), **EXACT)


def test_recomputed_tokens_are_counted_layer_by_layer():
    assert recomputed_tokens((((0, 1, 2, 3), ()), ((1,), ()), ((1,), ()), ((1,), (5,)))) == [(4 + 1 + 1 + 1) / 4, 1.0]
    plan = sparse(reader(), replace(CacheBlend(4), ratio=0.1)).plan
    free = SIZE - len(CHUNKS[0])
    assert sum(recomputed_tokens(plan.recompute)) == (2 * free + 2 * -(-SIZE // 10)) / 4
