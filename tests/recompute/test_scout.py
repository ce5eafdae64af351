"""Scout's block choice: evidence, look, promise, floor, cap, reach."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.recompute.digest import retrieval_pairs
from ragkv.recompute.evidence import BlockEvidence
from ragkv.recompute.scout import Scout, join_heads, pool_blocks, promised
from tests.recompute.test_samkv import piece

SCOUT = Scout(layers=3, heads=((1, 0), (2, 3)), group=2, scale=0.5, evidence=("attention",), tail=1, floor=1, cap=0.25)
SEEING = replace(SCOUT, heads=(), evidence=("meaning", "words"), opening=0)


def needle(blocks, at, strength, seed=0):
    """Return a chunk whose retrieval keys point at one token."""
    part = piece(blocks, seed)
    keys = torch.zeros(2, part.tokens, 4, dtype=torch.float64)
    if strength:
        keys[:, at, 0] = strength
    return replace(part, digest=replace(part.digest, retrieval_keys=keys))


def told(blocks, meaning, words=()):
    """Return a chunk with evidence: the cosine of some blocks, and those that have the question's only word."""
    unnamed = torch.zeros(blocks, 0, dtype=torch.bool)
    found = BlockEvidence(torch.zeros(blocks), torch.zeros(blocks, 1, dtype=torch.bool), unnamed, unnamed[0])
    for block, cosine in meaning.items():
        found.meaning[block] = cosine
    found.words[list(words)] = True
    return replace(piece(blocks, 1), evidence=found)


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
    assert count(SCOUT.plan(flat, queries())) == int(0.25 * 40), "uniform attention promises nothing: the cap holds"
    long = [needle(200, 0, 0, 1)]
    assert count(replace(SCOUT, growth=1.0).plan(long, queries())) == 50
    assert count(replace(SCOUT, growth=0.5).plan(long, queries())) == int(0.25 * 96 * (200 / 96) ** 0.5)
    sharp = [needle(20, 30, 80, 1), needle(20, 0, 0, 2)]
    narrow = replace(SCOUT, reach=0, opening=0, promise=0.5)
    assert count(narrow.plan(sharp, queries())) == 1, "the promise is kept"
    assert count(replace(narrow, floor=4).plan(sharp, queries())) == 4
    assert count(replace(narrow, floor=4, cap=0.05).plan(sharp, queries())) == 4, "the floor counts for more"
    short = [needle(2, 3, 80, 1), needle(2, 0, 0, 2)]
    assert count(replace(narrow, floor=6).plan(short, queries())) == 4, "a short context is kept whole"


def test_blocks_are_selected_until_the_promise_is_kept():
    logits = torch.tensor([0.2, 0.5, 0.05, 0.25]).log()
    scout = replace(SCOUT, opening=0)
    for promise, expected in ((0.4, (1,)), (0.6, (1, 3)), (0.9, (0, 1, 3)), (0.99, (0, 1, 2, 3))):
        assert scout.select_blocks((4,), logits, 1.0, promise) == (expected,)
        assert promised((4,), logits, (expected,)) >= promise
    assert promised((4,), logits, ((1, 3),)) == pytest.approx(0.75)


def test_a_plan_says_what_it_promises():
    certain = SEEING.plan([told(20, {7: 1.0}, (7,)), told(20, {})], [])
    assert certain.kept[0] == ((7,), ())
    assert certain.promised > 0.9
    unsure = replace(SEEING, cap=0.1).plan([told(20, {}), told(20, {})], [])
    assert unsure.promised == pytest.approx(0.1), "nothing tells the blocks apart: four of forty are kept"


def test_meaning_and_words_find_blocks_without_a_pass_of_the_model():
    pieces = [told(20, {3: 0.9}), told(20, {}, (12,)), told(20, {})]
    assert SEEING.composite_layers(3) == 0
    assert SEEING.composite_blocks(pieces) == ((), (), ())
    kept = {
        kinds: replace(SEEING, evidence=kinds, cap=0.02).plan(pieces, []).kept[0]
        for kinds in (("meaning",), ("words",))
    }
    assert kept == {("meaning",): ((3,), (), ()), ("words",): ((), (12,), ())}
    assert replace(SEEING, cap=0.04).plan(pieces, []).kept[0] == ((3,), (12,), ())


def test_meaning_and_words_count_beside_attention():
    """Attention points at two places alike; meaning decides."""
    keys = needle(10, 0, 0, 1).digest.retrieval_keys
    keys[:, [6, 26], 0] = 40
    told_of = replace(told(10, {6: 0.9}), digest=replace(piece(10, 1).digest, retrieval_keys=keys))
    scout = replace(SCOUT, evidence=("meaning", "words", "attention"), opening=0, reach=0, look=0, cap=0.1)
    assert scout.plan([told_of], queries()).kept[0] == ((6,),)
    assert scout.plan([replace(told_of, evidence=None)], queries()).kept[0] == ((1,),)


def test_attention_needs_heads():
    with pytest.raises(ValueError, match="retrieval heads"):
        replace(SCOUT, heads=())


def test_a_chunk_of_which_nothing_is_selected_keeps_nothing():
    plan = replace(SCOUT, reach=0).plan([needle(10, 0, 0, 1), needle(10, 22, 80, 2)], queries())
    assert plan.kept[0] == ((), (0, 5)), "the opening of the other chunk holds its title"
    assert plan.recompute[0][0] == ()
    bare = replace(SCOUT, reach=0, opening=0).plan([needle(10, 0, 0, 1), needle(10, 22, 80, 2)], queries())
    assert bare.kept[0] == ((), (5,))


def test_a_block_is_left_out_where_its_opening_does_not_fit():
    logits = torch.tensor([0, 0, 0, 0.9, 0, 0, 0, 0, 0.8, 0])
    assert SCOUT.select_blocks((5, 5), logits, 0.3, 1.0) == ((0, 3), ())
    assert SCOUT.select_blocks((5, 5), logits, 0.4, 1.0) == ((0, 3), (0, 3))


def test_the_model_is_asked_over_what_the_evidence_without_a_pass_finds():
    scout = replace(SCOUT, evidence=("meaning", "words", "attention"), look=0.1)
    assert scout.composite_blocks([told(10, {4: 0.9}), told(10, {})]) == ((0, 4), ())
    assert replace(scout, look=0).composite_blocks([told(10, {4: 0.9})]) == ((),)
    unknown = [needle(10, 0, 0, 1), told(10, {4: 0.9})]
    assert scout.composite_blocks(unknown) == ((), ()), "where nothing is known it is asked over the prefix alone"
    assert scout.composite_layers(3) == 3


def test_what_the_model_was_asked_over_is_kept_and_counts_for_the_cap():
    logits = torch.tensor([0.3, 0.9, 0.8, 0.5, 0, 0, 0, 0, 0, 0])
    scout = replace(SCOUT, opening=0)
    assert scout.select_blocks((5, 5), logits, 0.4, 1.0, ((), (4,))) == ((1, 2, 3), (4,))
    plan = replace(SCOUT, reach=0).plan([needle(10, 0, 0, 1), needle(10, 22, 80, 2)], queries(), ((3,), ()))
    assert {3} <= set(plan.kept[0][0])
    assert {0, 5} <= set(plan.kept[0][1])
    assert plan.recompute[0][0][-4:] == tuple(range(12, 16)), "what is kept is repaired"


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


def test_the_chunks_of_the_strongest_blocks_join_in_their_order():
    found = [told(10, {5: 0.6}), told(30, {}), told(10, {5: 0.7}), told(10, {5: 0.8})]
    evidence = [each.evidence for each in found]
    assert replace(SEEING, chunks=2).screen(evidence) == (2, 3)
    assert replace(SEEING, chunks=3).screen(evidence) == (0, 2, 3)
    many = told(10, dict.fromkeys(range(0, 10, 2), 0.75)).evidence
    assert replace(SEEING, chunks=1).screen([many, evidence[3]]) == (1,), "one strong block, not many weak ones"
    assert SEEING.screen(evidence) == (0, 1, 2, 3)
