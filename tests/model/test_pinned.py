"""Page-locked memory takes little more than what lies in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

from ragkv.model.pinned import packed, pinned_tensors

MIB = 2**20


def test_the_layers_of_a_long_context_take_a_fiftieth_more_than_their_bytes():
    """K and V of 32 layers, 64.5 MiB each: one by one they would take 128 MiB each."""
    allocations = packed([64 * MIB + MIB // 2] * 64)
    assert allocations == [(4096 * MIB, 63), (128 * MIB, 1)]


@runs(max_examples=200)
@given(st.lists(st.integers(0, 10**9), max_size=40))
def test_every_size_fits_and_no_allocation_is_more_than_twice_what_is_left(sizes):
    at = 0
    for capacity, count in packed(sizes):
        assert capacity & (capacity - 1) == 0
        assert count > 0
        assert sum(sizes[at : at + count]) <= capacity <= max(1, 2 * sum(sizes[at:]))
        at += count
    assert at == len(sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU reads page-locked memory")
def test_tensors_are_page_locked_and_do_not_overlap():
    tensors = pinned_tensors([(3, 2), (5,), (0, 4), (7, 2, 2)], torch.float32)
    for number, each in enumerate(tensors):
        each.fill_(number)
    assert all(each.is_pinned() and bool((each == number).all()) for number, each in enumerate(tensors))
