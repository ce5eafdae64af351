"""A fixed number of blocks: the output is exact over the blocks read, and the ranking is the stated one."""

import pytest
import torch

from ragkv.sparse.blocks import coverage
from ragkv.sparse.topk import TopBlocks, TopKeys
from tests.sparse.toy_request import GROUPINGS, assert_matches_dense, make_request, restricted

DIGESTS = ["cuboid", "quest", "exact"]


def state_after(params, request):
    state = params.start()
    request.prefill(state)
    outs = [request.step(state, at) for at in range(request.steps)]
    return state, outs


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_the_output_is_exact_over_the_blocks_that_are_read(digest, q_heads, kv_heads):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, steps=12)
    state = TopBlocks(count=4, digest=digest, block=8).start()
    request.prefill(state)
    for at in range(request.steps):
        out = request.step(state, at)
        marked = state.marked[0]
        torch.testing.assert_close(out, restricted(at, request, marked, 8), rtol=0, atol=1e-10)
        assert marked.sum(1).tolist() == [6] * kv_heads  # with the sinks' block and the newest


@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_the_exact_ranking_is_by_the_mean_share_of_a_blocks_keys_over_the_group(q_heads, kv_heads):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, rows=159, steps=1, gapped=False)
    state = TopBlocks(count=4, digest="exact", block=8).start()
    request.prefill(state)
    request.step(state, 0)  # 160 rows: block 0 has the sinks, block 19 is the newest
    group = q_heads // kv_heads
    for head in range(kv_heads):
        share = torch.zeros(20, dtype=torch.float64)
        for h in range(head * group, (head + 1) * group):
            weights = (request.k[:160, head] @ request.q[-1, h] * request.scale).softmax(-1)
            share += weights.view(20, 8).sum(1) / group
        best = (share[1:19].argsort(descending=True)[:4] + 1).tolist()
        assert state.marked[0][head].nonzero()[:, 0].tolist() == sorted([0, 19, *best])


@pytest.mark.parametrize("digest", DIGESTS)
def test_enough_blocks_are_all_blocks(digest):
    request = make_request()
    state, outs = state_after(TopBlocks(count=99, digest=digest, block=8), request)
    torch.testing.assert_close(outs[-1], request.dense(request.steps - 1), rtol=0, atol=1e-10)
    assert state.keys_read == state.keys_present


def test_no_blocks_leave_the_sinks_and_the_newest():
    request = make_request(steps=3)
    state, outs = state_after(TopBlocks(count=0, block=8), request)
    torch.testing.assert_close(outs[2], restricted(2, request, state.marked[0], 8), rtol=0, atol=1e-10)
    assert state.marked[0].sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("digest", ["cuboid", "quest"])
def test_no_digest_covers_more_than_the_exact_ranking(digest):
    request = make_request(rows=300, steps=1, sharp=4.0)
    share = {}
    for kind in ("exact", digest):
        state, _ = state_after(TopBlocks(count=6, digest=kind, block=8), request)
        found = coverage(request.q[-1], request.k, state.marked[0], 8, scale=request.scale)
        share[kind] = found.view(2, 4).mean(1)
    assert (share["exact"] >= share[digest] - 1e-12).all()
    assert (share["exact"] > share[digest] + 1e-6).any()


@pytest.mark.parametrize("digest", DIGESTS)
def test_enough_blocks_give_the_tokens_of_dense_attention(digest):
    assert_matches_dense(TopBlocks(count=99, digest=digest, block=4))


def test_a_context_shorter_than_a_block_is_read_densely():
    request = make_request(rows=9, question=4, steps=40)
    state = TopBlocks(count=2, block=32).start()
    request.prefill(state)
    for at in range(3):
        torch.testing.assert_close(request.step(state, at), request.dense(at), rtol=0, atol=1e-10)


@pytest.mark.parametrize("wrong", [{"count": -1}, {"block": 0}, {"sinks": -1}, {"digest": "mean"}])
def test_invalid_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TopBlocks(**wrong)


@pytest.mark.parametrize(("q_heads", "kv_heads"), GROUPINGS)
def test_top_keys_are_exact_over_the_best_keys_of_every_query_head(q_heads, kv_heads):
    request = make_request(q_heads=q_heads, kv_heads=kv_heads, steps=3)
    everything, outs = state_after(TopKeys(share=1.0), request)
    torch.testing.assert_close(outs[-1], request.dense(2), rtol=0, atol=1e-10)
    assert everything.keys_read == everything.keys_present
    few, less = state_after(TopKeys(share=0.0, least=2), request)
    assert [each.read.tolist() for each in few.key_counts] == [[2] * q_heads] * 3
    assert (less[-1] - request.dense(2)).abs().max() > 1e-6


@pytest.mark.parametrize("wrong", [{"share": 2}, {"least": 0}])
def test_invalid_values_of_top_keys_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        TopKeys(**wrong)
