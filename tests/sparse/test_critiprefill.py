"""CritiPrefill against its oracles (C1-C7, no leak from the future) and its golden example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.kernels.attention import attend
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.sparse.critiprefill import (
    CritiPrefill,
    block_shares,
    criticality,
    elementwise_bounds,
    fuse_layers,
    last_segment,
    segment_layout,
    top_blocks,
)
from ragkv.sparse.prefill import SparsePrefill
from tests.tiny import model, tokens

SMALL = CritiPrefill(segment=8, block=2, budget=6, skip=0, threshold=0)


def random_rows(count, heads, seed=0, d=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, d, generator=generator, dtype=torch.float64)


def prefill(params, q, k, v, start=0, layers=1, end=None):
    """Prefill rows q at positions start.. over k and v at positions 0... Returns the output of the last layer."""
    q_pos, k_pos = torch.arange(start, start + q.shape[0]), torch.arange(k.shape[0])
    sparse = SparsePrefill(params.start(), k.shape[0] if end is None else end)
    for layer in range(layers):
        out = sparse(layer, q, k, v, q_pos, k_pos, scale=0.3)
    return out, sparse


def dense(q, k, v, start=0):
    return attend(q, k, v, torch.arange(start, start + q.shape[0]), torch.arange(k.shape[0]), scale=0.3)


@pytest.mark.parametrize("count", [7, 8, 9, 40, 41, 55])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 1), (8, 2), (8, 8)])
def test_a_budget_for_everything_is_dense(count, q_heads, kv_heads):
    q, k, v = random_rows(count, q_heads, 1), random_rows(count, kv_heads, 2), random_rows(count, kv_heads, 3)
    out, _ = prefill(CritiPrefill(8, 2, 64, skip=0, threshold=0), q, k, v, layers=2)
    torch.testing.assert_close(out, dense(q, k, v), rtol=0, atol=1e-12)


def test_a_small_budget_is_not_dense_and_reads_less():
    q, k, v = random_rows(64, 8, 1), random_rows(64, 2, 2), random_rows(64, 2, 3)
    out, sparse = prefill(SMALL, q, k, v)
    assert (out - dense(q, k, v)).abs().max() > 1e-2
    assert sparse.computed_pairs < sparse.dense_pairs


def test_the_first_and_the_last_segment_are_dense_whatever_the_budget():
    q, k, v = random_rows(61, 8, 1), random_rows(61, 2, 2), random_rows(61, 2, 3)
    out, _ = prefill(SMALL, q, k, v)
    torch.testing.assert_close(out[:8], dense(q, k, v)[:8], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[56:], dense(q, k, v)[56:], rtol=0, atol=1e-12)


def test_a_budget_larger_than_the_earlier_tokens_takes_all_of_them():
    q, k, v = random_rows(24, 8, 1), random_rows(24, 2, 2), random_rows(24, 2, 3)
    out, _ = prefill(CritiPrefill(8, 2, 12, skip=0, threshold=0), q, k, v)
    torch.testing.assert_close(out[8:16], dense(q, k, v)[8:16], rtol=0, atol=1e-12)


def test_early_segments_and_layers_stay_dense():
    q, k, v = random_rows(64, 8, 1), random_rows(64, 2, 2), random_rows(64, 2, 3)
    late = CritiPrefill(8, 2, 4, skip=0, threshold=24)
    torch.testing.assert_close(prefill(late, q, k, v)[0][:24], dense(q, k, v)[:24], rtol=0, atol=1e-12)
    skipping = CritiPrefill(8, 2, 4, skip=1, threshold=0)
    assert prefill(skipping, q, k, v, layers=1)[1].computed_pairs == prefill(skipping, q, k, v, layers=1)[1].dense_pairs
    assert (prefill(skipping, q, k, v, layers=2)[0] - dense(q, k, v)).abs().max() > 1e-2


@pytest.mark.parametrize("pieces", [(24, 40), (8, 16, 40), (32, 16, 16)])
def test_an_input_read_in_parts_equals_one_pass(pieces):
    q, k, v = random_rows(64, 8, 1), random_rows(64, 2, 2), random_rows(64, 2, 3)
    whole, _ = prefill(SMALL, q, k, v, layers=2)
    start, out = 0, []
    for count in pieces:
        stop = start + count
        out.append(prefill(SMALL, q[start:stop], k[:stop], v[:stop], start, layers=2, end=64)[0])
        start = stop
    torch.testing.assert_close(torch.cat(out), whole, rtol=0, atol=1e-12)


def test_rows_that_begin_inside_a_segment_are_exact_with_a_budget_for_everything():
    q, k, v = random_rows(30, 8, 1), random_rows(51, 2, 2), random_rows(51, 2, 3)
    out, _ = prefill(CritiPrefill(8, 2, 64, skip=0, threshold=0), q, k, v, start=21)
    torch.testing.assert_close(out, dense(q, k, v, 21), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(st.integers(8, 55), st.integers(0, 99))
def test_later_tokens_do_not_change_an_earlier_row(cut, seed):
    q, k, v = random_rows(64, 4, seed), random_rows(64, 2, seed + 1), random_rows(64, 2, seed + 2)
    k2, v2, q2 = k.clone(), v.clone(), q.clone()
    stop = cut // 8 * 8  # all rows of a segment share their selection
    k2[stop:], v2[stop:], q2[stop:] = 9 * k[stop:], -v[stop:], 5 * q[stop:]
    before, after = prefill(SMALL, q, k, v, layers=2)[0], prefill(SMALL, q2, k2, v2, layers=2)[0]
    torch.testing.assert_close(after[:stop], before[:stop], rtol=0, atol=0)


def test_the_papers_order_of_softmax_and_mask_lets_the_future_change_the_past():
    def literal(q, k):
        raw = criticality(q, k, 8, 2)
        return raw.softmax(-1) * torch.tensor([[b < 4 * s for b in range(raw.shape[2])] for s in range(raw.shape[1])])

    q, k = random_rows(64, 4, 1), random_rows(64, 2, 2)
    other = k.clone()
    other[32:] *= 9
    assert (literal(q, k)[:, :4] - literal(q, other)[:, :4]).abs().max() > 1e-3
    allowed = torch.tensor([[b < 4 * s for b in range(32)] for s in range(8)])
    ours = [block_shares(criticality(q, each, 8, 2), allowed)[:, :4] for each in (k, other)]
    torch.testing.assert_close(*ours, rtol=0, atol=0)


def test_golden_scores():
    q = torch.tensor([[1, 0], [2, 1], [0, 1], [1, -1], [2, 2], [0, -1], [1, 1], [-1, 0]]).double()[:, None]
    k = torch.tensor([[1, 0], [0, 1], [2, 1], [-1, 1], [0, 2], [1, -1], [1, 1], [0, 0]]).double()[:, None]
    raw = criticality(q, k, 4, 2)
    assert raw[0].tolist() == [[1, 2, 1, 1], [1, 1.5, 1.5, 1]]
    allowed = torch.tensor([[False] * 4, [True, True, False, False]])
    score = block_shares(raw, allowed)
    assert score[0, 0].tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(score[0, 1, :2], torch.tensor([0.3775, 0.6225]).double(), rtol=0, atol=6e-5)
    before = torch.tensor([[[0, 0, 0, 0], [0.5, 0.5, 0, 0]]]).double()
    torch.testing.assert_close(
        fuse_layers(score, before, 0.75)[0, 1, :2], torch.tensor([0.4081, 0.5919]).double(), rtol=0, atol=6e-5
    )
    torch.testing.assert_close(
        fuse_layers(score, before, 0.25)[0, 1, :2], torch.tensor([0.4694, 0.5306]).double(), rtol=0, atol=6e-5
    )
    assert top_blocks(score, allowed, 1)[0].tolist() == [[False] * 4, [False, True, False, False]]


def test_scores_average_the_query_heads_of_a_group():
    q, k = random_rows(16, 8, 1), random_rows(16, 2, 2)
    apart = criticality(q, k.repeat_interleave(4, dim=1), 8, 2)
    torch.testing.assert_close(criticality(q, k, 8, 2), apart.unflatten(0, (2, 4)).mean(1))


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 40), size=st.integers(1, 9), offset=st.integers(0, 8), seed=st.integers(0, 9))
def test_bounds_are_those_of_every_run_of_rows(count, size, offset, seed):
    """The first run lacks `offset` rows, and the last one may lack some, too."""
    x, offset = random_rows(count, 3, seed), offset % size
    ends = range(size - offset, count + size, size)
    runs = [x[max(0, end - size) : end] for end in ends]
    high, low = elementwise_bounds(x, size, offset)
    assert torch.equal(high, torch.stack([run.amax(0) for run in runs if len(run)]))
    assert torch.equal(low, torch.stack([run.amin(0) for run in runs if len(run)]))


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(2, 60),
    before=st.integers(0, 30),
    budget=st.sampled_from([2, 4, 6, 64]),
    threshold=st.sampled_from([0, 20]),
    stitched=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_longest_list_of_a_layer_is_known_from_positions(count, before, budget, threshold, stitched, seed):
    """The kernels divide their work by it, so it is exact; keys behind a gap are in the order of a shuffled cache."""
    params, keys = CritiPrefill(8, 2, budget, skip=0, threshold=threshold), before + count
    k_pos = torch.randperm(keys, generator=torch.Generator().manual_seed(seed)) if stitched else torch.arange(keys)
    q_pos, end = torch.arange(before, keys), None if stitched else keys
    if stitched:
        q_pos = torch.cat([q_pos[: count // 2 : 3], q_pos[count // 2 :]])
    q, k = random_rows(len(q_pos), 4, seed), random_rows(keys, 2, seed + 1)
    index = params.start().select(0, q, k, q_pos, k_pos, end=end, scale=0.3)
    if index is not None:
        assert index.blocks.shape[2] == max(1, int(index.counts.max()))


def test_a_model_under_a_budget_for_everything_gives_its_dense_logits():
    tiny, ids = model(), tokens(50)
    logits = []
    for attention in (None, SparsePrefill(CritiPrefill(8, 2, 64, threshold=0).start(), 50)):
        cache = ContextCache(tiny.shape, 50, tiny.dtype)
        logits.append(tiny.forward([append(cache, ids, 0, outputs=50, attention=attention)])[0])
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)


def test_inputs_below_the_threshold_stay_dense():
    assert not CritiPrefill().why_dense(10, 10)
    assert not CritiPrefill(threshold=4096).why_dense(1, 4097)
    assert CritiPrefill(threshold=4096).why_dense(4096, 4096).endswith("4096 tokens, threshold=4096 asks for more")


def test_with_the_scale_of_attention_all_blocks_have_a_share_where_scores_are_large():
    """Without it the second best block of keys as long as those of real models is not told from the worst."""
    raw = torch.tensor([[[0.0, 300.0, 100.0, 160.0]]])
    allowed = torch.ones(1, 4, dtype=torch.bool)
    assert top_blocks(block_shares(raw / 8, allowed), allowed, 2)[0, 0].tolist() == [False, True, False, True]
    assert block_shares(raw, allowed)[0, 0].tolist() == [0, 1, 0, 0]


def test_a_question_over_a_stitched_context_has_segments_of_few_rows():
    q, k, v = random_rows(11, 4, 1), random_rows(75, 2, 2), random_rows(75, 2, 3)
    q_pos, k_pos = torch.arange(64, 75), torch.arange(75)
    params = CritiPrefill(segment=512, block=2, budget=6, skip=0, few=4)
    sparse = SparsePrefill(params.start(), None)
    found = sparse(0, q, k, v, q_pos, k_pos, scale=0.3)
    apart = [
        SparsePrefill(params.start(), None)(0, q[a:b], k[: 64 + b], v[: 64 + b], q_pos[a:b], k_pos[: 64 + b], scale=0.3)
        for a, b in ((0, 4), (4, 8), (8, 11))
    ]
    torch.testing.assert_close(found, torch.cat(apart), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"segment": 0}, {"block": 0}, {"budget": 8}, {"fusion": 1.5}, {"skip": -1}, {"few": 3}, {"few": 0}]
)
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be"):
        CritiPrefill(**wrong)


@pytest.mark.parametrize(("end", "start"), [(1, 0), (511, 0), (512, 0), (513, 512), (1024, 512)])
def test_the_last_segment_of_an_input_is_the_one_it_ends_in(end, start):
    assert last_segment(end, 512) == start


def test_a_question_as_long_as_a_segment_has_segments_of_few_rows():
    params = CritiPrefill(segment=8, block=2, budget=6, skip=0, few=4)
    sizes = [
        segment_layout(torch.arange(40, 40 + rows), torch.arange(40 + rows), None, params, torch.device("cpu")).size
        for rows in (4, 5, 8, 9)
    ]
    assert sizes == [4, 4, 4, 8]


def test_a_block_that_reaches_into_a_segment_is_no_candidate_of_it():
    """Block 9 has positions 38 to 41, and the segment begins at 40: the segment reads it besides its budget."""
    params = CritiPrefill(segment=8, block=4, budget=8, skip=0, threshold=0)
    layout = segment_layout(torch.arange(40, 48), torch.arange(2, 48), 60, params, torch.device("cpu"))
    assert layout.allowed[0].tolist() == [True] * 9 + [False] * 3
    assert layout.own[0].tolist() == [False] * 9 + [True] * 3
