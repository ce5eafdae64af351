"""Scout's block choice: two looks, weakest, floor, cap, reach."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.recompute.digest import retrieval_pairs
from ragkv.recompute.scout import Scout, join_heads, pool_blocks
from tests.recompute.test_samkv import piece

SCOUT = Scout(layers=3, heads=((1, 0), (2, 3)), group=2, scale=0.5, tail=1, floor=1, cap=0.25)


def needle(blocks, at, strength, seed=0):
    """Return a chunk whose retrieval keys point at one token."""
    part = piece(blocks, seed)
    keys = torch.zeros(2, part.tokens, 4, dtype=torch.float64)
    if strength:
        keys[:, at, 0] = strength
    return replace(part, digest=replace(part.digest, retrieval_keys=keys))


def queries():
    question = torch.zeros(3, 4, 4, dtype=torch.float64)
    question[-1, :, 0] = 1.0
    return [question] * 3


def test_query_heads_of_one_group_share_their_keys():
    assert retrieval_pairs(((7, 4), (7, 3), (6, 4), (8, 0)), 3) == ((6, 1), (7, 1), (8, 0))


def test_the_block_a_retrieval_head_points_at_is_kept_in_every_layer():
    plan = SCOUT.plan([needle(10, 0, 0, 1), needle(10, 22, 40, 2)], queries())
    assert plan.one_pass
    assert all(5 in layer[1] for layer in plan.kept)
    assert plan.kept[0] == plan.kept[1] == plan.kept[2]


def test_with_a_tail_of_one_only_the_last_question_token_scores_blocks():
    rows = queries()
    rows = [torch.cat([-r[-1:], r[-1:]]) for r in rows]
    plan = SCOUT.plan([needle(10, 0, 0, 1), needle(10, 22, 40, 2)], rows)
    assert 5 in plan.kept[0][1]


def test_every_token_of_the_question_finds_its_own_block():
    """A name in the question matches along axis 1, the last token along axis 0. Each matches another chunk."""
    question = torch.zeros(2, 4, 4, dtype=torch.float64)
    question[0, :, 1] = question[1, :, 0] = 1.0
    named, needle_chunk = needle(10, 0, 0, 1), needle(10, 22, 80, 2)
    named.digest.retrieval_keys[:, 18, 1] = 80
    for tail, expected in ((1, False), (2, True), (64, True)):
        kept = (
            replace(SCOUT, tail=tail, reach=0, opening=0, floor=2, cap=0.1)
            .plan([named, needle_chunk], [question] * 3)
            .kept[0]
        )
        assert 5 in kept[1]
        assert (4 in kept[0]) == expected


def count(plan):
    return sum(map(len, plan.kept[0]))


def test_the_budget_lies_between_floor_and_cap():
    flat = [needle(20, 0, 0, 1), needle(20, 0, 0, 2)]
    assert count(SCOUT.plan(flat, queries())) == int(0.25 * 40), "uniform attention has no weak block: the cap holds"
    sharp = [needle(20, 30, 80, 1), needle(20, 0, 0, 2)]
    narrow = replace(SCOUT, reach=0, opening=0)
    assert count(narrow.plan(sharp, queries())) == 1, "all other blocks are weak"
    assert count(replace(narrow, floor=4).plan(sharp, queries())) == 4
    assert count(replace(narrow, floor=4, cap=0.05).plan(sharp, queries())) == 4, "the floor counts for more"
    short = [needle(2, 3, 80, 1), needle(2, 0, 0, 2)]
    assert count(replace(narrow, floor=6).plan(short, queries())) == 4, "a short context is kept whole"


def test_blocks_are_selected_down_to_a_share_of_the_best_one():
    """Scores 2, 1, .5, .25, 0: with a weakest of .25 the first three are strong enough."""
    pieces, masses = sized(20), [[0.5, 2.0, 0.25, 1.0, 0.0]]
    for weakest, expected in ((0.6, (1,)), (0.5, (1, 3)), (0.25, (0, 1, 3)), (0.1, (0, 1, 2, 3)), (0, (0, 1, 2, 3, 4))):
        scout = replace(SCOUT, opening=0, weakest=weakest)
        assert scout.select_blocks(pieces, masses, 1.0) == (expected,)


def test_a_chunk_of_which_nothing_is_selected_keeps_nothing():
    plan = replace(SCOUT, reach=0).plan([needle(10, 0, 0, 1), needle(10, 22, 80, 2)], queries())
    assert plan.kept[0] == ((), (0, 5)), "the opening of the other chunk holds its title"
    assert plan.recompute[0][0] == ()
    bare = replace(SCOUT, reach=0, opening=0).plan([needle(10, 0, 0, 1), needle(10, 22, 80, 2)], queries())
    assert bare.kept[0] == ((), (5,))


def test_a_block_is_left_out_where_its_opening_does_not_fit():
    pieces, masses = sized(20, 20), [[0, 0, 0, 0.9, 0], [0, 0, 0, 0.8, 0]]
    assert replace(SCOUT, weakest=0.5).select_blocks(pieces, masses, 0.3) == ((0, 3), ())
    assert replace(SCOUT, weakest=0.5).select_blocks(pieces, masses, 0.4) == ((0, 3), (0, 3))


def test_the_first_look_asks_over_the_prefix_alone_and_the_second_over_what_it_found():
    pieces = [needle(10, 0, 0, 1), needle(10, 22, 80, 2)]
    scout = replace(SCOUT, reach=0, look=0.1)
    assert scout.composite_blocks(pieces) == ((), ())
    assert scout.second_look(pieces, queries()) == ((), (0, 5))
    assert replace(scout, look=0).second_look(pieces, queries()) == ()


def test_what_the_second_look_read_is_kept_and_counts_for_the_cap():
    pieces, masses = sized(20, 20), [[0.3, 0.9, 0.8, 0.5, 0], [0, 0, 0, 0, 0]]
    scout = replace(SCOUT, opening=0)
    assert scout.select_blocks(pieces, masses, 0.4, ((), (4,))) == ((1, 2, 3), (4,))
    plan = replace(SCOUT, reach=0).plan([needle(10, 0, 0, 1), needle(10, 22, 80, 2)], queries(), ((3,), ()))
    assert plan.kept[0] == ((3,), (0, 5))
    assert plan.recompute[0][0] == pieces[0].rows((3,)), "what is kept is repaired"


def test_the_score_of_a_token_at_the_end_of_a_block_spreads_to_the_next_block():
    scores, pieces = torch.zeros(1, 12), sized(12)
    scores[0, 7] = 1.0
    assert pool_blocks(scores, pieces, 0)[0].tolist() == [0, 1, 0]
    assert pool_blocks(scores, pieces, 2)[0].tolist() == [0, 3, 2]


def test_the_score_of_a_token_at_the_end_of_a_chunk_does_not_spread_to_the_next_chunk():
    scores, pieces = torch.zeros(1, 15), sized(6, 9)
    scores[0, 5] = 1.0
    assert pool_blocks(scores, pieces, 2)[0].tolist() == [1, 2, 0, 0, 0]
    scores[0, 14] = 2.0
    assert pool_blocks(scores, pieces, 2)[0].tolist() == [1, 2, 0, 4, 2]


def test_agreement_of_heads_beats_one_head_alone():
    """Averaged, the first and the last block win with .35. With power .5 they have (sqrt(.7) / 2)² = .175 each."""
    masses = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.3, 0.7]])
    torch.testing.assert_close(join_heads(masses, 1.0), torch.tensor([0.35, 0.3, 0.35]))
    torch.testing.assert_close(join_heads(masses, 0.5), torch.tensor([0.175, 0.3, 0.175]) / 0.65)
    torch.testing.assert_close(join_heads(9 * masses, 0.5), join_heads(masses, 0.5))


@given(st.lists(st.integers(1, 14), min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_kept_blocks_lie_in_their_chunk_behind_its_opening_and_within_the_cap(sizes, cap, seed):
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for i, blocks in enumerate(sizes):
        part = piece(blocks, seed + i)
        keys = torch.randn(2, part.tokens, 4, generator=generator, dtype=torch.float64)
        pieces.append(replace(part, digest=replace(part.digest, retrieval_keys=keys)))
    kept = replace(SCOUT, cap=cap).plan(pieces, queries()).kept[0]
    for part, blocks in zip(pieces, kept, strict=True):
        assert list(blocks) == sorted(set(blocks))
        assert set(blocks) <= set(range(part.blocks))
        assert not blocks or blocks[0] == 0
    assert 1 <= sum(map(len, kept)) <= max(2, cap * sum(sizes)), "one block and its opening, or what the cap allows"


def sized(*tokens):
    """Return chunks with these token counts, in blocks of 4. Their digests are not used."""
    return [replace(needle(4, 0, 0, 1), tokens=count, block=4) for count in tokens]


def test_the_relevance_of_a_chunk_weighs_the_scores_of_its_blocks():
    twins = [needle(10, 22, 40, 1), replace(needle(10, 22, 40, 1), relevance=0.5)]
    even, halved, squared = (replace(SCOUT, prior=prior).block_mass(twins, queries()) for prior in (0, 1, 2))
    assert even[0] == even[1], "no prior, no difference"
    for masses, factor in ((halved, 0.5), (squared, 0.25)):
        torch.testing.assert_close(torch.tensor(masses[1]), factor * torch.tensor(masses[0]))
        assert sum(map(sum, masses)) == pytest.approx(1)


def test_the_chunks_of_the_strongest_blocks_join_in_their_order():
    chunks = [needle(10, 22, 80, 1), needle(30, 0, 0, 2), needle(10, 22, 81, 3), needle(10, 22, 82, 4)]
    assert replace(SCOUT, chunks=2).screen(chunks, queries()) == (2, 3)
    assert replace(SCOUT, chunks=3).screen(chunks, queries()) == (0, 2, 3)
    many = needle(10, slice(None, None, 4), 81.5, 5)
    assert replace(SCOUT, chunks=1).screen([many, chunks[3]], queries()) == (1,), "one strong block, not many weak ones"
    assert SCOUT.screen(chunks, queries()) == (0, 1, 2, 3)
    doubted = [*chunks[:3], replace(chunks[3], relevance=0.1)]
    assert replace(SCOUT, chunks=2, prior=3).screen(doubted, queries()) == (0, 2)


def test_an_irrelevant_chunk_loses_its_place_to_a_relevant_one():
    weak, strong = needle(10, 22, 40, 1), replace(needle(10, 22, 41, 2), relevance=0.2)
    bare = replace(SCOUT, opening=0, reach=0, cap=0.05)
    found = [replace(bare, prior=prior).plan([weak, strong], queries()).kept[0] for prior in (0.0, 3.0)]
    assert found == [((), (5,)), ((5,), ())]
