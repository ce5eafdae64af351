"""PSA: threshold 1 reads everything, the output is exact over the blocks read, and the stop is that of algorithm 1."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.kernels.attention import merge
from ragkv.sparse.attention import attend_heads
from ragkv.sparse.blocks import BlockDigests, block_logsumexp, bounding_box, coverage, cuboid
from ragkv.sparse.psa import (
    ProgressiveRead,
    Psa,
    RankedBlocks,
    accumulated_share,
    attend_progressively,
    attend_progressively_at_once,
)
from tests.sparse.toy_request import GROUPINGS, assert_matches_dense, greedy, make_request, normal, restricted
from tests.tiny import model, tokens

PSA = Psa(block=8)
FIGURE = [98, 84, 68, 55, 31, 22, 15, 10, 8.2, 6.1, 4.9, 4.3, 3.1, 2.2, 1.6, 1.2]


def blocks_of(masses, dtype=torch.float64):
    """Return q [1, 1, 1] and k, v [n, 1, 1]: blocks of 2 equal keys, with these masses under scale 1."""
    k = torch.tensor(masses, dtype=dtype).div(2).log().repeat_interleave(2)[:, None, None]
    return torch.ones(1, 1, 1, dtype=dtype), k, torch.arange(len(k), dtype=dtype)[:, None, None]


def read_masses(masses, threshold, micro, order=None, least=0, part=0.0):
    order = torch.arange(len(masses))[None] if order is None else order
    q, k, v = blocks_of(masses)
    params = Psa(threshold=threshold, block=2, micro=micro, least=least, part=part)
    return attend_progressively(q, k, v, RankedBlocks(order), params, scale=1.0)


def run(params, request, steps=None):
    state = params.start()
    request.prefill(state)
    return state, [request.step(state, at) for at in range(request.steps if steps is None else steps)]


@settings(deadline=None, max_examples=60)
@given(
    heads=st.sampled_from([(1, 1), (2, 3), (4, 2)]),
    blocks=st.integers(0, 23),
    lacking=st.integers(0, 3),
    micro=st.integers(1, 5),
    threshold=st.sampled_from([0.137, 0.613, 0.951, 1.0]),  # none equals the share of some number of blocks
    least=st.integers(0, 9),
    part=st.sampled_from([0.0, 0.25, 1.0]),
    group=st.sampled_from(["min", "mean"]),
    bound=st.sampled_from(["least", "batch"]),
    near=st.booleans(),
    beyond=st.sampled_from([0.0, 2.5]),
    seed=st.integers(0, 99),
)
def test_at_once_the_same_blocks_are_read_as_in_the_loop(
    heads, blocks, lacking, micro, threshold, least, part, group, bound, near, beyond, seed
):
    generator = torch.Generator().manual_seed(seed)
    (kv, g), d, size = heads, 8, 4
    params = Psa(threshold=threshold, block=size, micro=micro, least=least, part=part, group=group, bound=bound)
    q = torch.randn(kv, g, d, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(blocks * size + lacking, kv, d, generator=generator, dtype=torch.float64) for _ in range(2))
    order = torch.stack([torch.randperm(blocks, generator=generator) for _ in range(kv)])[:, 1:]
    before = attend_heads(q, *(x[:3].transpose(0, 1) for x in (k, v)), scale=0.7) if near and len(k) > 2 else None
    one, other = (
        attend_ranked(q, k, v, RankedBlocks(order, before, beyond), params, scale=0.7)
        for attend_ranked in (attend_progressively, attend_progressively_at_once)
    )
    assert torch.equal(one.blocks_read, other.blocks_read)
    for a, b in (
        (one.out, other.out),
        (one.lse, other.lse),
        (one.p_acc, other.p_acc),
        (one.log_as_min, other.log_as_min),
    ):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


# The numbers of algorithm 1.


def test_partial_results_merge_by_their_mass():
    parts = [(torch.tensor([[float(o)]]), torch.tensor([math.log(mass)])) for mass, o in ((3, 1), (1, 5))]
    out, lse = merge(parts)
    assert out.item() == pytest.approx(2)
    assert math.exp(lse.item()) == pytest.approx(4)


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (12, [0.4094, 0.9054, 1.0]),
        (14, [0.3567, 0.8646, 0.9793]),
        (16, [0.3161, 0.8272, 0.9594]),
        (20, [0.2574, 0.7614, 0.9220]),
    ],
)
def test_the_share_after_each_four_blocks_of_the_figure(count, shares):
    for batch, expected in enumerate(shares, 1):
        known = torch.tensor(FIGURE[: 4 * batch], dtype=torch.float64)
        assert accumulated_share(known.sum().log(), known.min().log(), count - 4 * batch).item() == pytest.approx(
            expected, abs=5e-5
        )


def test_the_share_after_each_block_of_the_figure():
    expected = "0625 1340 2205 3161 4963 6194 7343 8272 8720 9156 9426 9594 9778 9894 9961".split()
    for blocks, share in enumerate(expected, 1):
        known = torch.tensor(FIGURE[:blocks], dtype=torch.float64)
        assert accumulated_share(known.sum().log(), known.min().log(), 16 - blocks).item() == pytest.approx(
            float("." + share), abs=5e-5
        )


@pytest.mark.parametrize(
    ("threshold", "micro", "blocks"), [(0.95, 1, 12), (0.95, 4, 12), (0.98, 1, 14), (0.98, 4, 16), (1.0, 4, 16)]
)
def test_where_the_reading_of_the_figure_stops(threshold, micro, blocks):
    assert read_masses(FIGURE, threshold, micro).blocks_read.tolist() == [blocks]


def test_of_equal_blocks_just_more_than_the_threshold_is_read():
    for threshold in (0.33, 0.51, 0.96):
        assert read_masses([5.0] * 40, threshold, 1).blocks_read.item() == math.floor(threshold * 40) + 1
    assert accumulated_share(torch.tensor(5.0).log(), torch.tensor(1.0).log(), 15).item() == pytest.approx(5 / 20)


def test_the_smallest_number_of_blocks_is_read_whatever_the_share():
    masses = [1e-6, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert read_masses(masses, 0.1, 1).blocks_read.item() == 1, "after one weak block, all others count as equally weak"
    assert read_masses(masses, 0.1, 1, least=3).blocks_read.item() == 3
    assert read_masses(masses, 0.1, 2, least=3).blocks_read.item() == 4, "whole micro-batches"
    assert read_masses(masses, 0.1, 1, least=99).blocks_read.item() == 6, "no more than there are"
    assert read_masses(masses, 0.1, 1, part=0.5).blocks_read.item() == 3
    assert read_masses(masses, 0.1, 1, least=2, part=0.7).blocks_read.item() == 5, "whichever is more"


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), st.floats(0.05, 0.999), st.integers(1, 9))
@settings(deadline=None)
def test_with_the_true_order_the_share_is_never_overestimated(masses, threshold, micro):
    masses = sorted(masses, reverse=True)
    done = read_masses(masses, threshold, micro)
    assert done.p_acc.item() <= sum(masses[: done.blocks_read]) / sum(masses) + 1e-12


def test_with_a_wrong_order_the_share_is_overestimated():
    masses = [1e-3] + [1.0] * 30
    done = read_masses(masses, 0.9, 1)
    assert done.blocks_read.item() > 1  # after one small block, the others count as equally small
    falling = torch.arange(31).roll(-1)[None]
    assert read_masses([1e6, *[1e-3] * 30], 0.9, 1, falling).p_acc.item() > 0.9
    assert read_masses([1e6, *[1e-3] * 30], 0.9, 1, falling).blocks_read.item() < 31


@given(st.integers(0, 10**6), st.integers(1, 7))
@settings(max_examples=25, deadline=None)
def test_larger_micro_batches_only_round_the_count_up(seed, micro):
    masses = torch.exp(2 * normal(37, seed=seed)).tolist()
    single, several = (read_masses(masses, 0.9, m).blocks_read.item() for m in (1, micro))
    assert several == min(37, -(-single // micro) * micro)


def test_a_higher_threshold_never_reads_less():
    request = make_request(steps=1)
    marks = [run(replace(PSA, threshold=t, micro=1), request)[0].marked[0].sum(1) for t in (0.3, 0.6, 0.9, 0.97, 1.0)]
    assert all((more >= less).all() for less, more in pairwise(marks))
    assert (marks[0] < marks[-1]).any()


# Digests.


def test_the_box_of_three_keys():
    keys = torch.tensor([[0.0, 2], [2, 4], [4, 0]], dtype=torch.float64)[None, :, None]
    center, radius = cuboid(keys)
    torch.testing.assert_close(center[0, 0] + radius[0, 0], torch.tensor([10 / 3, 10 / 3], dtype=torch.float64))
    torch.testing.assert_close(center[0, 0] - radius[0, 0], torch.tensor([2 / 3, 2 / 3], dtype=torch.float64))
    q = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    for box, expected in ((cuboid, 8 / 3), (bounding_box, 4.0)):
        blocks = BlockDigests(3, 0, box)
        blocks.update(keys[0], torch.arange(3))
        assert blocks.scores(q).item() == pytest.approx(expected)


def test_a_block_of_equal_keys_scores_like_its_key():
    key, q = normal(1, 2, 8, seed=1), normal(2, 4, 8, seed=2)
    blocks = BlockDigests(5, 0, cuboid)
    blocks.update(key.expand(5, -1, -1), torch.arange(5))
    expected = torch.einsum("hgd,hd->hg", q, key[0]).mean(1)
    torch.testing.assert_close(blocks.scores(q)[:, 0], expected)


@given(st.integers(0, 10**6), st.sampled_from(GROUPINGS))
@settings(max_examples=20, deadline=None)
def test_a_score_is_the_mean_over_the_group_of_the_best_corner(seed, heads):
    q, k = normal(heads[1], heads[0] // heads[1], 8, seed=seed), normal(24, heads[1], 8, seed=seed + 1)
    for box in (cuboid, bounding_box):
        blocks = BlockDigests(6, 1, box)
        blocks.update(k[:13], torch.arange(13))
        blocks.update(k, torch.arange(24))
        center, radius = box(k.unflatten(0, (4, 6)))
        high, low = ((center + sign * radius).permute(1, 0, 2)[:, None] for sign in (1, -1))
        best = torch.maximum(q[:, :, None] * high, q[:, :, None] * low).sum(-1).mean(1)
        torch.testing.assert_close(blocks.scores(q), best)


# Steps of a request.


@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
@pytest.mark.parametrize("gapped", [True, False])
def test_threshold_1_reads_every_block_and_equals_dense_attention(q_heads, kv_heads, gapped):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, gapped=gapped)
    state, outs = run(replace(PSA, threshold=1.0), request)
    for at, out in enumerate(outs):
        torch.testing.assert_close(out, request.dense(at), rtol=0, atol=1e-10)
    assert state.keys_read == state.keys_present > 0


def test_peaked_attention_in_float32_still_reads_every_block_at_threshold_1():
    request = make_request(sharp=200.0, steps=2)
    request.q, request.k, request.v = request.q.float(), request.k.float(), request.v.float()
    state, outs = run(replace(PSA, threshold=1.0, micro=1), request)
    assert bool(state.marked[0].all())
    assert read_masses([1e30, *[1e-30] * 31], 1.0, 1).blocks_read.item() == 32
    torch.testing.assert_close(outs[1], request.dense(1), rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_the_output_is_exact_over_the_blocks_that_are_read(q_heads, kv_heads):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, sharp=3.0)
    state = replace(PSA, threshold=0.7, micro=2).start()
    request.prefill(state)
    sparse = False
    for at in range(request.steps):
        out = request.step(state, at)
        torch.testing.assert_close(out, restricted(at, request, state.marked[0], 8), rtol=0, atol=1e-10)
        sparse |= not bool(state.marked[0].all())
    assert sparse
    assert state.keys_read < state.keys_present


def test_the_sinks_block_and_the_newest_are_always_read():
    request = make_request(sharp=6.0)
    state = replace(PSA, threshold=0.1, micro=1).start()
    request.prefill(state)
    earliest = int(request.positions.argmin()) // 8
    for at in range(request.steps):
        request.step(state, at)
        assert bool(state.marked[0][:, [earliest, -1]].all())
        assert state.marked[0].shape[1] == -(-(request.rows + at + 1) // 8)


def test_keys_read_are_counted_per_kv_head_and_step():
    request = make_request()
    state = replace(PSA, threshold=0.6).start()
    request.prefill(state)
    for at in range(request.steps):
        request.step(state, at)
        marked, rows = state.marked[0], request.rows + at + 1
        sizes = torch.full((marked.shape[1],), 8)
        sizes[-1] = rows - 8 * (len(sizes) - 1)
        assert state.key_counts[-1].read.tolist() == (marked * sizes).sum(1).tolist()
        assert state.key_counts[-1].present == rows
    assert state.keys_present == sum(2 * (request.rows + at + 1) for at in range(request.steps))


def test_a_block_that_is_not_full_does_not_end_the_reading():
    """Its mass is tiny and must not be taken for the mass of the unread blocks. Here, 19 full blocks are equal."""
    request = make_request(rows=19 * 8 + 1, steps=1, gapped=False)
    request.k[:-2], request.k[-2:] = 0.0, -40 * request.q[-1].unflatten(0, (2, 4)).mean(1)
    state, _ = run(replace(PSA, threshold=0.9, micro=1, sinks=0), request)
    assert state.marked[0][:, :-1].sum(1).tolist() == [math.floor(0.9 * 19) + 1] * 2


def test_a_kv_head_stops_when_its_least_covered_query_head_is_covered():
    request = make_request(sharp=4.0, steps=1)
    least, mean = (run(replace(PSA, threshold=0.8, micro=1, group=g), request)[0] for g in ("min", "mean"))
    stopped = ~least.marked[0].all(1)
    assert bool((least.p_acc[0].view(2, 4).amin(1)[stopped] > 0.8).all())
    assert (mean.marked[0] <= least.marked[0]).all()
    assert mean.keys_read < least.keys_read


def test_first_layers_can_stay_dense():
    request = make_request()
    state, outs = run(replace(PSA, threshold=0.1, dense=1), request)
    torch.testing.assert_close(outs[-1], request.dense(request.steps - 1), rtol=0, atol=1e-10)
    assert state.keys_read == state.keys_present
    assert not state.marked


@given(st.permutations(range(12)))
@settings(max_examples=15, deadline=None)
def test_the_order_in_which_blocks_arrive_does_not_matter(order):
    request = make_request(rows=12 * 8 + 5, question=5, steps=3)
    moved = torch.cat([torch.arange(8) + 8 * b for b in order] + [torch.arange(96, 104)])
    other = replace(request, k=request.k[moved], v=request.v[moved], positions=request.positions[moved])
    for one, same in zip(run(PSA, request)[1], run(PSA, other)[1], strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-10)


def test_later_rows_do_not_change_earlier_outputs():
    request = make_request()
    _, outs = run(PSA, request)
    request.k[request.rows + 10 :] = 7.0
    request.v[request.rows + 10 :] = -9.0
    for one, same in zip(outs[:10], run(PSA, request, steps=10)[1], strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=0)


def test_a_row_at_an_earlier_position_is_read_densely_and_sees_no_later_key():
    request = make_request(steps=2)
    state = PSA.start()
    request.prefill(state)
    request.positions[-2] = 50_000
    request.step(state, 0)
    dense = request.dense(1)
    request.k[-2], request.v[-2] = 100.0, 100.0
    torch.testing.assert_close(request.step(state, 1), dense, rtol=0, atol=1e-10)
    assert len(state.key_counts) == 1


def test_a_cache_that_shrank_is_refused():
    request = make_request()
    state, _ = run(PSA, request)
    with pytest.raises(ValueError, match="start a new state"):
        request.step(state, 0)


def test_true_coverage_is_the_mass_of_what_was_read():
    request = make_request(sharp=4.0, steps=1)
    state, _ = run(replace(PSA, threshold=0.8), request)
    _, q, k, *_ = request.call_args(0)
    share = coverage(q[0], k, state.marked[0], 8, scale=0.35)
    scores = torch.einsum("hgd,nhd->hgn", q[0].unflatten(0, (2, 4)), k).flatten(0, 1) * 0.35
    rows = state.marked[0].repeat_interleave(8, dim=1)[:, : len(k)].repeat_interleave(4, dim=0)
    torch.testing.assert_close(share, (scores.softmax(-1) * rows).sum(1))
    torch.testing.assert_close(block_logsumexp(q[0], k, 8, scale=0.35).logsumexp(-1), scores.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_close(dtype):
    request = make_request(steps=4)
    expected = [request.dense(at) for at in range(4)]
    request.q, request.k, request.v = (x.to(dtype) for x in (request.q, request.k, request.v))
    _, outs = run(replace(PSA, threshold=1.0), request)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for out, requested in zip(outs, expected, strict=True):
        assert out.dtype == dtype
        assert (out.double() - requested).norm() < tolerance * requested.norm() + tolerance


# Through the model.


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_threshold_1_gives_the_tokens_of_dense_attention(kind):
    assert_matches_dense(replace(PSA, threshold=1.0, block=4), kind)


def test_a_request_alone_gives_the_same_tokens_as_in_a_batch():
    params, tiny = replace(PSA, threshold=0.6, block=4, micro=1), model()
    contexts, questions = [tokens(61, 1), tokens(24, 2)], [tokens(9, 3), tokens(5, 4)]
    together = greedy(tiny, [params.start(), params.start()], contexts, questions)
    state = params.start()
    alone = greedy(tiny, [state], contexts[:1], questions[:1])
    assert together[0][0] == alone[0][0]
    torch.testing.assert_close(together[0][1], alone[0][1], rtol=0, atol=1e-10)
    assert state.keys_read < state.keys_present


def test_a_context_shorter_than_a_block_is_read_densely():
    request = make_request(rows=9, question=4, steps=40)
    state = Psa(block=32).start()
    request.prefill(state)
    for at in range(3):
        torch.testing.assert_close(request.step(state, at), request.dense(at), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": 0.0},
        {"threshold": 1.1},
        {"block": 0},
        {"micro": 0},
        {"sinks": -1},
        {"group": "max"},
        {"dense": -1},
    ],
)
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Psa(**wrong)


class ThreeBlocks:
    """Blocks outside of a cache: one of a single row, which scores best, and two full ones. All keys are zeros."""

    def __init__(self):
        self.left = [(1.0, 1), (0.5, 4), (0.5, 4)]

    def keys(self, layer):
        scores, sizes = zip(*self.left, strict=True) if self.left else ((), ())
        return torch.tensor([[[score, 0.0] for score in scores]], dtype=torch.float64), torch.tensor(sizes)

    def fetch(self, layer, which):
        rows = sum(self.left[i][1] for i in which)
        self.left = [block for i, block in enumerate(self.left) if i not in which]
        return torch.zeros(rows, 1, 2, dtype=torch.float64), torch.ones(rows, 1, 2, dtype=torch.float64)


def test_a_short_block_that_is_fetched_does_not_end_the_reading():
    """The cache has the mass of two blocks. With the short one 9 of 17 rows are read; unscaled it seems 9 of 11."""
    params = Psa(threshold=0.7, block=4, micro=1, reach="all")
    done = ProgressiveRead(
        torch.zeros(1, 1, 2).double(),
        torch.tensor([[8.0]]).double().log(),
        torch.tensor([0]),
        torch.tensor([[0.1]]),
        torch.tensor([[4.0]]).double().log(),
    )
    q, bar = torch.tensor([[[1.0, 0.0]]]).double(), torch.tensor([math.inf])
    state = params.start()
    state._seen[0] = (8, 7)
    read, fetched = state._attend_offloaded(0, ThreeBlocks(), q, done, bar, 0, scale=1.0)
    assert fetched == 1 + 4
    assert float(read.p_acc) == pytest.approx(13 / 17)


def test_one_light_block_that_is_ranked_too_high_does_not_end_the_reading_where_its_batch_bounds_the_rest():
    """Of 12 equal blocks and one light one, which is read second: 4 of 13 are about a third of the mass."""
    masses = [10.0, 0.001, *[10.0] * 11]
    paper = read_masses(masses, 0.9, 4)
    q, k, v = blocks_of(masses)
    params = Psa(threshold=0.9, block=2, micro=4, bound="batch")
    batch = attend_progressively(q, k, v, RankedBlocks(torch.arange(13)[None]), params, scale=1.0)
    assert int(paper.blocks_read) == 4
    assert float(paper.p_acc) > 0.99
    assert int(batch.blocks_read) == 12
    assert float(batch.p_acc) == pytest.approx(110.001 / 120.001)
