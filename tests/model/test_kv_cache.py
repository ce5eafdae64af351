"""The context cache: rows are added by layer, and some of them are pending."""

from __future__ import annotations

import copy

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


def test_extend_appends_the_rows_of_another_cache():
    one, other = filled((1, 0, 3)), filled((9, 2, 0))
    one.extend(other)
    assert one.lengths == [10, 2, 3]
    for layer, before in enumerate((1, 0, 3)):
        for side in (ContextCache.k, ContextCache.v):
            assert torch.equal(side(one, layer)[before:], side(other, layer))
        assert torch.equal(one.positions(layer)[before:], other.positions(layer))
    assert torch.equal(one.k(0)[:1], rows(1, 0))
    assert other.lengths == [9, 2, 0]


def test_an_empty_cache_can_be_extended_by_an_empty_cache():
    cache = filled((0, 0, 0))
    cache.extend(filled((0, 0, 0), capacity=0))
    assert cache.lengths == [0, 0, 0]


class CountedCopy:
    """A pending copy that counts its waits."""

    waited = 0

    def wait(self):
        self.waited += 1


def test_a_copy_of_two_layers_is_waited_for_once():
    cache, both, late = filled((1, 1, 1)), CountedCopy(), CountedCopy()
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


def test_addresses_are_those_of_the_tensors_also_after_the_cache_grew_or_was_copied():
    cache = filled((1, 0, 3), capacity=4)

    def found():
        own = [each.data_ptr() for each in cache.tensors]
        return [own[:3], own[3:]]

    assert cache.addresses(1).tolist() == found()
    assert cache.addresses(1) is cache.addresses(1)
    before = cache.addresses(1).tolist()
    assert cache.addresses(6).tolist() == found()
    assert cache.addresses(0).tolist() != before
    assert cache.lengths == [1, 0, 3]
    assert all(each.shape[0] >= length + 6 for each, length in zip(cache.tensors, (1, 0, 3), strict=False))
    assert copy.deepcopy(cache).addresses(0).tolist() != cache.addresses(0).tolist()


def test_a_row_is_appended_to_every_layer():
    cache = filled((1, 0, 3), capacity=4)
    cache.append_row(17)
    assert cache.lengths == [2, 1, 4]
    assert [int(cache.positions(layer)[-1]) for layer in range(3)] == [17, 17, 17]
    assert cache.positions(2)[:3].tolist() == [2, 3, 4]
