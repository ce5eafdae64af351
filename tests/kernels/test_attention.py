"""Attention over scattered positions equals dense attention, for every head grouping. Oracles O5, O6, O7."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragkv.kernels.attention import attend, merge
from ragkv.kernels.attention_reference import attend_lse, visible

GROUPINGS = [(8, 1), (8, 2), (8, 4), (8, 8)]


def rows(count, heads, seed=0, d=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, d, generator=generator, dtype=torch.float64)


def dense(q, k, v, mask, scale):
    """Compute textbook attention with repeated key/value heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,nhd->htn", q, k) * scale
    return torch.einsum("htn,nhd->thd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
@pytest.mark.parametrize(
    ("q_pos", "k_pos"),
    [
        (list(range(9)), list(range(9))),  # prefill
        ([12], list(range(13))),  # decoding
        ([9, 10, 11], [*range(5), 9, 10, 11]),  # a question after a gap
        ([1, 4], [0, 1, 2, 3, 4, 5]),  # repair in the middle
        ([4, 1], [5, 3, 4, 0, 2, 1]),  # positions decide, order does not
    ],
)
def test_attention_sees_exactly_the_keys_at_or_before_the_query(q_heads, kv_heads, q_pos, k_pos):
    q, k, v = rows(len(q_pos), q_heads, 1), rows(len(k_pos), kv_heads, 2), rows(len(k_pos), kv_heads, 3)
    at, to = torch.tensor(q_pos), torch.tensor(k_pos)
    expected = dense(q, k, v, visible(at, to), 0.3)
    torch.testing.assert_close(attend(q, k, v, at, to, scale=0.3), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attend_lse(q, k, v, at, to, scale=0.3)[0], expected, rtol=0, atol=1e-12)


def test_a_bottom_right_triangle_is_wrong_for_scattered_queries():
    at, to = torch.tensor([1, 4]), torch.arange(6)
    q, k, v = rows(2, 8, 1), rows(6, 2, 2), rows(6, 2, 3)
    bottom_right = torch.ones(2, 6, dtype=torch.bool).tril(4)
    wrong = dense(q, k, v, bottom_right, 0.3)
    assert (attend(q, k, v, at, to, scale=0.3) - wrong).abs().max() > 1e-3


def test_no_queries_give_no_rows():
    empty = torch.empty(0, dtype=torch.int64)
    assert attend(rows(0, 8), rows(3, 2), rows(3, 2), empty, torch.arange(3), scale=1.0).shape == (0, 8, 8)


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.permutations(range(4)))
def test_any_partition_of_the_keys_in_any_order_merges_to_full_attention(owner, order):
    q, k, v = rows(5, 8, 1), rows(12, 2, 2), rows(12, 2, 3)
    at, to = torch.arange(7, 12), torch.arange(12)
    parts = []
    for part in order:
        held = torch.tensor([i for i, o in enumerate(owner) if o == part], dtype=torch.int64)
        parts.append(attend_lse(q, k[held], v[held], at, to[held], scale=0.3))
    out, lse = merge(parts)
    expected, expected_lse = attend_lse(q, k, v, at, to, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


def test_merging_with_an_empty_part_changes_nothing():
    q, k, v, at = rows(3, 8, 1), rows(4, 2, 2), rows(4, 2, 3), torch.arange(10, 13)
    part = attend_lse(q, k, v, at, torch.arange(4), scale=0.3)
    empty = attend_lse(q, k[:0], v[:0], at, torch.arange(0), scale=0.3)
    assert torch.isneginf(empty[1]).all()
    assert (empty[0] == 0).all()
    for a, b in zip(merge([part, empty]), part, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
