"""EPIC's link tokens."""

from ragkv.recompute.epic import Epic
from tests.recompute.test_samkv import piece


def test_the_first_tokens_of_every_chunk_but_the_first_are_recomputed_and_everything_is_kept():
    pieces = [piece(blocks, blocks) for blocks in (3, 1, 4)]
    plan = Epic(layers=2, link=6).plan(pieces, [])
    sizes = [p.tokens for p in pieces]
    expected = ((), tuple(range(min(6, sizes[1]))), tuple(range(6)))
    assert plan.recompute == (expected, expected)
    assert plan.kept == (((0, 1, 2), (0,), (0, 1, 2, 3)),) * 2
    assert not any(any(layer) for layer in plan.padding)


def test_epic_needs_no_query():
    assert Epic(2).composite_blocks([piece(3, 0)]) == ()
    assert Epic(2).composite_layers(2) == 0


def test_local_tokens_are_the_last_ones_of_every_chunk_but_the_first():
    pieces = [piece(blocks, blocks) for blocks in (3, 1, 4)]
    plan = Epic(layers=1, link=2, local=3).plan(pieces, [])
    sizes = [p.tokens for p in pieces]
    expected = [(), *(tuple(sorted({*range(min(2, n)), *range(max(0, n - 3), n)})) for n in sizes[1:])]
    assert [list(tokens) for tokens in plan.recompute[0]] == [list(tokens) for tokens in expected]
    assert len(plan.recompute[0][2]) == 5
