"""SamKV's formulas against hand-computed values. Golden values 12.5, oracles S5, S7-S11."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.recompute.base import Piece, fixed_blocks, padding_for, rows_alive
from ragkv.recompute.evidence import BlockEvidence
from ragkv.recompute.samkv import SamKV, fuse, personalise, score, top_p
from ragkv.types import Digest

LAYERS, Q_HEADS, KV_HEADS, D = 3, 4, 2, 4


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def piece(blocks, seed=0, block=4, exact=False, layers=LAYERS):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tokens = blocks * block - 1 if blocks else 0
    first = torch.arange(blocks) * block
    return Piece(
        tokens,
        block,
        Digest(
            mean_keys=draw(layers, blocks, KV_HEADS, D),
            local_query=draw(layers, Q_HEADS, D),
            alpha=draw(layers, blocks).float(),
            unimportance=draw(layers, blocks).float(),
            landmarks=first[:, None].expand(layers, -1, -1).int(),
            retrieval_keys=draw(0, tokens, D),
        ),
        exact,
    )


def queries(seed=9, count=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(count, Q_HEADS, D, generator=g, dtype=torch.float64) for _ in range(LAYERS)]


def test_eq_1_adds_the_other_chunks_local_queries_by_their_cosine():
    q_loc = torch.stack([vector(0, 1), vector(0.6, 0.8), vector(-0.6, 0.8)])[:, None, None]
    q_hat = personalise(vector(1, 0)[None, None], q_loc)
    torch.testing.assert_close(q_hat[0, 0, 0], vector(1.0, 0.48))


@pytest.mark.parametrize("cosine", ["flat", "head"])
def test_eq_1_with_one_chunk_is_the_generic_query(cosine):
    q_que = torch.randn(LAYERS, Q_HEADS, D)
    q_hat = personalise(q_que, torch.zeros(1, LAYERS, Q_HEADS, D), cosine)
    assert torch.equal(q_hat[0], q_que)
    assert not q_hat.isnan().any()


@given(st.permutations([1, 2, 3]))
def test_eq_1_does_not_depend_on_the_order_of_the_other_chunks(order):
    q_que, q_loc = torch.randn(LAYERS, Q_HEADS, D).double(), torch.randn(4, LAYERS, Q_HEADS, D).double()
    swapped = q_loc[[0, *order]]
    torch.testing.assert_close(personalise(q_que, swapped)[0], personalise(q_que, q_loc)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("s_max", "anchor", "s_min", "p"),
    [(10, 6, 2, 0.5), (10, 10, 2, 0), (10, 2, 2, 0), (10, 1, 2, 0), (10, 11, 2, 0), (3, 2.5, 5, 0)],
)
def test_eq_2(s_max, anchor, s_min, p):
    assert top_p(s_max, anchor, s_min) == p


def test_scores_add_the_query_heads_of_a_group_on_their_own_kv_head():
    query, keys = torch.randn(1, 4, 3), torch.randn(1, 5, 2, 3)
    by_hand = [sum(float(query[0, h] @ keys[0, b, h // 2]) for h in range(4)) for b in range(5)]
    torch.testing.assert_close(score(query, keys)[0], torch.tensor(by_hand), rtol=1e-4, atol=1e-4)


def worked_example():
    """Return section 12.5's example: one layer, one head, d = 2, fixed blocks 0, 6, 7, middle 1..5 (there: 0..4)."""
    keys = torch.stack([vector(*k) for k in [(1, 0), (2, 0), (1, 1), (0, 2), (-1, 0), (3, -1), (2, 1), (0, 1)]])
    digest = Digest(
        mean_keys=keys[None, :, None],
        local_query=torch.zeros(1, 1, 2, dtype=torch.float64),
        alpha=torch.tensor([[9.0, 2, 2, 2, 2, 1, 9, 9]]),  # K_max: block 5
        unimportance=torch.tensor([[9.0, 2, 2, 2, 1, 2, 9, 9]]),  # K_min: block 4
        landmarks=torch.zeros(1, 8, 1, dtype=torch.int32),
        retrieval_keys=torch.zeros(0, 32, 2),
    )
    return Piece(32, 4, digest)


def test_the_worked_selection_of_the_fact_sheet():
    sam, one = SamKV(layers=(0,)), worked_example()
    q_hat = vector(1, 0.48)[None, None]
    scores = score(q_hat, one.digest.mean_keys)
    torch.testing.assert_close(scores[0, 1:6], vector(2, 1.48, 0.96, -1, 2.52))
    assert top_p(2.52, 1.32, -1) == pytest.approx(0.3409, abs=1e-4)
    assert sam._budget(one, q_hat, one.digest.mean_keys, score(q_hat, one.digest.mean_keys)) == 2
    normalised = sam._normalised(one, scores, q_hat.flatten(1).norm(dim=-1))
    torch.testing.assert_close(normalised[0, [5, 1]], vector(2.2718, 1.8030), rtol=0, atol=1e-4)
    kept = sam.plan([one], [vector(1, 0.48)[None, None]]).kept
    assert kept == (((0, 1, 5, 6, 7),),)


def test_the_cross_document_filter_keeps_the_best_candidates_over_the_number_of_chunks():
    sam, three = SamKV(), [worked_example()] * 3
    scores = [[0, 1.8030, 0, 0, 0, 2.2718, 0, 0], [0, 2.0, 0.5, 0, 0, 0, 0, 0], [0, 1.9, 0, 0, 0, 0, 0, 0]]
    assert sam._filter(three, [2, 2, 1], scores, size=5) == [(5,), (1,), ()]


def test_fusion_weights_new_rows_by_their_cosine_to_the_old():
    torch.testing.assert_close(fuse(vector(1, 0)[None, None], vector(0.8, 0.6)[None, None])[0, 0], vector(0.96, 0.12))


def test_fusion_of_equal_rows_changes_nothing_and_opposite_rows_keep_the_old():
    rows = torch.randn(7, 2, 4).double()
    torch.testing.assert_close(fuse(rows, rows), rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(fuse(rows, -rows), -rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(fuse(3 * rows, rows), 3 * rows, rtol=0, atol=1e-12)  # theta = 1 is overwrite


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.sampled_from(["static", "dynamic"]),
    st.sampled_from(["candidates", "all"]),
    st.sampled_from(["query", "min_max"]),
    st.sampled_from(["flat", "head"]),
    st.booleans(),
    st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_every_choice_keeps_the_fixed_blocks_and_stays_inside_the_chunk(
    sizes, extremes, total, norm, cosine, shared, seed
):
    pieces = [piece(blocks, seed + i) for i, blocks in enumerate(sizes)]
    sam = SamKV(layers=(1, 2), extremes=extremes, total=total, normalise=norm, cosine=cosine, shared=shared)
    plan = sam.plan(pieces, queries(seed))
    selected = 0
    for layer in plan.kept:
        for part, kept in zip(pieces, layer, strict=True):
            assert list(kept) == sorted(set(kept))
            assert set(fixed_blocks(part.blocks, 1, 2)) <= set(kept) <= set(range(part.blocks))
            if part.blocks <= 3:
                assert kept == tuple(range(part.blocks))
            selected += len(kept) - min(3, part.blocks)
    middle = sum(max(0, blocks - 3) for blocks in sizes)
    if len(sizes) > 1 and total == "candidates" and not shared:
        assert selected <= LAYERS * math.ceil(middle / len(sizes))
    for layer, recomputed in enumerate(plan.recompute):
        for part, kept, tokens in zip(pieces, plan.kept[layer], recomputed, strict=True):
            assert set(tokens) <= set(part.rows(kept))


def test_the_number_retrieved_is_between_none_and_all_of_the_middle():
    for seed in range(50):
        part = piece(9, seed)
        q_hat = torch.randn(LAYERS, Q_HEADS, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for extremes in ("static", "dynamic"):
            budget = SamKV(layers=(1, 2), extremes=extremes)._budget(
                part, q_hat, part.digest.mean_keys, score(q_hat, part.digest.mean_keys)
            )
            assert 0 <= budget <= 6


def test_the_exact_first_chunk_is_never_recomputed():
    plan = SamKV(layers=(1,)).plan([piece(6, 1, exact=True), piece(6, 2)], queries())
    assert all(layer[0] == () for layer in plan.recompute)
    assert all(len(layer[1]) >= 11 for layer in plan.recompute)  # three fixed blocks of 4, the last one partial


def test_each_ablation_drops_its_part():
    pieces, q = [piece(9, 1), piece(9, 2)], queries()
    fixed = tuple(fixed_blocks(9, 1, 2) for _ in pieces)
    assert SamKV(layers=(1,), middle="none").plan(pieces, q).kept == (fixed,) * LAYERS
    assert all(kept == tuple(range(9)) for kept in SamKV(layers=(1,), middle="all").plan(pieces, q).kept[0])
    assert not any(any(layer) for layer in SamKV(layers=(1,), repair="none").plan(pieces, q).recompute)
    shared = SamKV(layers=(1, 2), extremes="dynamic", shared=True).plan(pieces, q).kept
    assert shared[0] == shared[1] == shared[2]
    biased, plain = (SamKV(layers=(1, 2), extremes="dynamic", bias=b)._retrieve(pieces, q) for b in (True, False))
    assert biased != plain


token_sets = st.lists(st.integers(0, 15), max_size=6).map(lambda tokens: tuple(sorted(set(tokens))))


@given(st.lists(st.tuples(token_sets, token_sets), min_size=1, max_size=5))
def test_rows_alive_shrink_by_layer_and_contain_all_tokens_recomputed_above(recompute):
    alive = rows_alive(recompute)
    for layer in range(len(recompute)):
        for i in range(2):
            assert set(alive[layer][i]) == set().union(*(r[i] for r in recompute[layer:]))
    if len({tuple(r) for r in recompute}) == 1:
        assert [tuple(layer) for layer in alive] == [tuple(r) for r in recompute]


def test_a_row_that_only_passes_through_is_padded_from_its_stored_block():
    pieces = [piece(6, 1), piece(6, 2)]
    kept = (((0, 4, 5), (0, 4, 5)), ((0, 2, 4, 5), (0, 4, 5)), ((0, 4, 5), (0, 4, 5)))
    recompute = (((0, 16), ()), ((0, 9, 16), ()), ((0, 16), ()))
    assert padding_for(pieces, kept, recompute) == (((2,), ()), ((), ()), ((), ()))


def test_a_block_that_is_both_extremes_may_leave_the_least_salient_of_the_others():
    chunk = piece(8, seed=3)
    chunk.digest.alpha[:, 3], chunk.digest.unimportance[:, 3] = -9, -9
    none, others = (SamKV(layers=(0, 1, 2), extremes="static", same=same) for same in ("none", "others"))
    q_hat, keys = torch.stack(queries()).mean(1), chunk.digest.mean_keys
    scores = score(q_hat, keys)
    assert none._budget(chunk, q_hat, keys, scores) == 0
    middle = list(range(1, 6))
    p = []
    for layer in range(LAYERS):
        least = min((b for b in middle if b != 3), key=lambda b: float(chunk.digest.unimportance[layer, b]))
        anchor = float(scores[layer, [0, 6, 7]].mean())
        p.append(top_p(float(scores[layer, 3]), anchor, float(scores[layer, least])))
    assert others._budget(chunk, q_hat, keys, scores) == math.ceil(sum(p) / LAYERS * len(middle) - 1e-9)
    assert sum(p) > 0


def test_at_least_a_share_of_the_middle_is_retrieved():
    chunk = piece(13, seed=1)
    kept = SamKV(layers=(0, 1, 2), least=0.4).plan([chunk], queries()).kept
    assert all(len(layer[0]) >= 3 + 4 for layer in kept)
    with pytest.raises(ValueError, match="least must be between 0 and 1"):
        SamKV(least=1.5)


def test_evidence_ranks_blocks_at_the_budgets_of_the_query():
    chunks = [piece(13, seed=seed) for seed in (1, 2)]
    method = SamKV(layers=(0, 1, 2), choose="evidence", least=0.3)
    assert method.evidence == ("meaning", "words", "links")
    assert SamKV().evidence == ()
    strong = torch.zeros(13)
    strong[[5, 7, 8]] = torch.tensor([3.0, 2.0, 1.0])
    nothing = torch.zeros(13, 0, dtype=torch.bool)
    found = [BlockEvidence(strong * i, nothing, nothing, nothing[0]) for i in (0, 1)]
    told = [replace(chunk, evidence=mine) for chunk, mine in zip(chunks, found, strict=True)]
    kept = method.plan(told, queries()).kept
    assert all(set(layer[1]) >= {5, 7, 8} for layer in kept)
    sizes = [sum(map(len, layer)) for layer in replace(method, choose="query").plan(chunks, queries()).kept]
    assert [sum(map(len, layer)) for layer in kept] == sizes
    told[0] = chunks[0]  # of an earlier turn: nothing is known of it, and the question is still answered
    assert [sum(map(len, layer)) for layer in method.plan(told, queries()).kept] == sizes


def test_shared_selections_are_those_of_the_stable_layers():
    chunks = [piece(13, seed=seed) for seed in (5, 6)]
    method = SamKV(layers=(1, 2), extremes="dynamic", total="all")
    apart, shared = (replace(method, shared=flag).plan(chunks, queries()).kept for flag in (False, True))
    union = tuple(tuple(sorted({*apart[1][i], *apart[2][i]})) for i in range(2))
    assert shared == (union,) * LAYERS
    assert any(set(apart[0][i]) - set(union[i]) for i in range(2)), "the first layer alone would keep more"
