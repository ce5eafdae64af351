"""The context cache: rows come in by layer, and some of them are on their way."""

from __future__ import annotations

import torch

from ragkv.model.kv_cache import ContextCache
from ragkv.types import Shape

SHAPE = Shape(3, 4, 2, 8)


def rows(count, seed):
    return torch.randn(count, 2, 8, generator=torch.Generator().manual_seed(seed))


def filled(lengths, capacity=4):
    cache = ContextCache(SHAPE, capacity, torch.float32)
    for layer, length in enumerate(lengths):
        cache.put(layer, rows(length, layer), rows(length, 10 + layer), torch.arange(length) + layer)
    return cache


def test_a_cache_goes_on_with_the_rows_of_another():
    one, other = filled((1, 0, 3)), filled((9, 2, 0))
    one.extend(other)
    assert one.lengths == [10, 2, 3]
    for layer, begun in enumerate((1, 0, 3)):
        for side in (ContextCache.k, ContextCache.v):
            assert torch.equal(side(one, layer)[begun:], side(other, layer))
        assert torch.equal(one.positions(layer)[begun:], other.positions(layer))
    assert torch.equal(one.k(0)[:1], rows(1, 0))
    assert other.lengths == [9, 2, 0]


def test_nothing_goes_on_with_nothing():
    cache = filled((0, 0, 0))
    cache.extend(filled((0, 0, 0), capacity=0))
    assert cache.lengths == [0, 0, 0]


class Coming:
    """Knows how often it was waited for."""

    waited = 0

    def wait(self):
        self.waited += 1


def test_layers_that_come_together_are_waited_for_once():
    cache, both, late = filled((1, 1, 1)), Coming(), Coming()
    cache.record_event(0, both)
    cache.record_event(1, both)
    cache.record_event(2, late)
    cache.k(0), cache.v(1)
    assert (both.waited, late.waited) == (1, 0)
    cache.k(2)
    assert (both.waited, late.waited) == (1, 1)
    cache.record_event(1, both)
    cache.k(1)
    assert both.waited == 2
