"""What is drafted: the longest n-gram at its first place, and less of it the less is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.engine.drafting import Drafter, DraftParams, PromptLookup

TOKENS = st.lists(st.integers(0, 3), max_size=14)
"""So few different tokens that n-grams repeat all the time."""
LENGTHS = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: DraftParams(sum(pair), pair[0]))


def copied(texts, answer, params, count, never=()):
    """The reference: every place of every n-gram, one after the other."""
    pieces = [[]]
    for text in texts:
        for token in text:
            pieces.append([]) if token in never else pieces[-1].append(token)
        pieces.append([])
    for length in range(min(params.longest, len(answer)), params.shortest - 1, -1):
        for piece in (*pieces, answer):
            for end in range(length, len(piece)):
                if piece[end - length : end] == answer[len(answer) - length :]:
                    return tuple(piece[end : end + count])
    return ()


@given(st.lists(TOKENS, max_size=4), TOKENS, LENGTHS, st.integers(0, 6), st.sets(st.integers(0, 3), max_size=1))
def test_a_lookup_finds_what_a_search_of_all_places_finds(texts, answer, params, count, never):
    answer = [token for token in answer if token not in never]
    lookup = PromptLookup(texts, params, never)
    for at, token in enumerate(answer):
        lookup.append([token])
        expected = copied(texts, answer[: at + 1], params, count, never) if count else ()
        assert lookup.find(count) == expected
        assert lookup.answered == at + 1


@given(st.lists(TOKENS, max_size=4), TOKENS, LENGTHS)
def test_a_draft_never_comes_where_it_was_said_that_none_may(texts, answer, params):
    drafter = Drafter(texts, params=params)
    for size in range(1, len(answer)):
        may = drafter.may_propose(answer[:size])
        assert may or not Drafter(texts, params=params).propose(answer[: size + 1], 4)


def test_drafts_may_come_where_a_token_more_ends_what_is_looked_up():
    drafter = Drafter([range(100, 120)], params=DraftParams(4, 3))
    assert not drafter.may_propose([100])
    assert drafter.may_propose([100, 101])
    assert not drafter.may_propose([100, 101, 7])


def test_a_draft_neither_begins_in_one_text_and_ends_in_another_nor_holds_a_stop_token():
    texts, stop = ([4, 5, 6, 7], [8, 9], [0, 1, 2, 3, 99, 4]), [99]
    params = DraftParams(shortest=3)
    assert Drafter(texts, (), params).propose([4, 5, 6], 9) == (7,)
    assert Drafter(texts, (), params).propose([5, 6, 7], 9) == ()
    assert Drafter(texts, (), params).propose([0, 1, 2], 9) == (3, 99, 4)
    assert Drafter(texts, stop, params).propose([0, 1, 2], 9) == (3,)
    assert Drafter(texts, stop, params).propose([1, 2, 3], 9) == ()


def test_the_answer_itself_comes_last():
    answer, params = [0, 1, 2, 3, 0, 1, 2], DraftParams(shortest=3)
    assert Drafter([[7, 8, 9]], (), params).propose(answer, 3) == (3, 0, 1)
    assert Drafter([[0, 1, 2, 4]], (), params).propose(answer, 3) == (4,)


def verified(drafter, answer, right, limit=99):
    """Draft once behind the answer and accept so many of the tokens. Returns the answer behind it, and the draft."""
    draft = drafter.propose(answer, limit)
    for _ in draft[:right]:
        drafter.accept()
    return [*answer, *draft[:right], 1000], draft


def counting(params):
    """A drafter over texts in which every pair of tokens is followed by a long text."""
    return Drafter([[i, 1000, *range(200, 300)] for i in (1, 1000, *range(200, 300))], (), params)


def test_drafts_double_while_they_are_accepted_and_go_back_when_they_are_not():
    params = DraftParams(longest=2, shortest=2, first=3, most=10)
    drafter, answer, sizes = counting(params), [1, 1000], []
    for right in (99, 99, 99, 5, 2, 99):
        answer, draft = verified(drafter, answer, right)
        sizes.append(len(draft))
    assert sizes == [3, 6, 10, 10, 5, 3]
    assert (drafter.passes, drafter.drafted, drafter.accepted) == (6, 37, 3 + 6 + 10 + 5 + 2 + 3)


def test_rejected_drafts_are_followed_by_ever_longer_pauses_without_one():
    drafter, answer, drafted = counting(DraftParams(longest=2, shortest=2, first=4, pause=20)), [1, 1000], []
    for at in range(70):
        answer, draft = verified(drafter, [*answer[:-1], 1000], 0)
        drafted += [(at, len(draft))] if draft else []
    # Pauses of 3, 15, 20 and 20 tokens. Each draft is half as long as the one before.
    assert drafted == [(0, 4), (4, 2), (20, 1), (41, 1), (62, 1)]
    answer, _ = verified(drafter, [1, 1000] * 60, 1)
    assert drafter.propose(answer, 99), "an accepted token ends the pauses"


def test_a_draft_is_never_longer_than_it_may_be():
    for limit in (-1, 0, 1, 2):
        assert len(counting(DraftParams(shortest=2)).propose([1, 1000], limit)) == max(0, limit)


@pytest.mark.parametrize("wrong", [{"shortest": 0}, {"longest": 4}, {"first": 0}, {"most": 7}, {"pause": -1}])
def test_parameters_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError, match="must hold"):
        DraftParams(**wrong)
