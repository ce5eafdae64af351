"""Evidence: kinds on one scale, joined to the logits of blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.recompute.evidence import WEIGHTS, BlockEvidence, evidence_logits, inverse_frequencies, standardised


def told(meaning, *words):
    """Return evidence of a chunk; words: which windows have each word."""
    flags = torch.tensor([[window in mine for mine in words] for window in range(len(meaning))])
    return BlockEvidence(torch.tensor(meaning), flags.reshape(len(meaning), len(words)).bool())


def test_a_rare_word_counts_for_more_than_a_common_one_and_one_that_is_everywhere_for_nothing():
    present = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]]).bool()
    expected = [math.log(4 / 2) + math.log(4 / 3), math.log(4 / 3), 0.0]
    torch.testing.assert_close(inverse_frequencies(present), torch.tensor(expected))


def test_each_kind_is_standardised_over_all_blocks_of_the_context():
    found = [told([0.1, 0.5], {1}), told([0.3], set())]
    meaning = torch.tensor([0.1, 0.5, 0.3])
    words = torch.tensor([0.0, math.log(2), 0.0])
    z = [(each - each.mean()) / each.std(correction=0) for each in (meaning, words)]
    joined = WEIGHTS["meaning"] * z[0] + WEIGHTS["words"] * z[1]
    torch.testing.assert_close(evidence_logits(found, ("meaning", "words")), joined)
    torch.testing.assert_close(evidence_logits(found, ("words",)), WEIGHTS["words"] * z[1])
    assert evidence_logits(found, ("attention",)).tolist() == [0, 0, 0], "a pass of the model is not evidence here"


def test_what_tells_no_blocks_apart_says_nothing():
    assert standardised(torch.full((3,), 0.4)).tolist() == [0, 0, 0]
    assert evidence_logits([told([0.4, 0.4]), told([0.4])], ("meaning", "words")).tolist() == [0, 0, 0]


@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5), min_size=1, max_size=4), st.randoms())
@settings(max_examples=50, deadline=None)
def test_the_order_of_chunks_changes_no_logit(chunks, random):
    found = [told(meaning, set(range(0, len(meaning), 2))) for meaning in chunks]
    order = random.sample(range(len(found)), len(found))
    logits = evidence_logits(found, ("meaning", "words")).split([len(each) for each in chunks])
    mixed = evidence_logits([found[i] for i in order], ("meaning", "words")).split([len(chunks[i]) for i in order])
    for at, number in enumerate(order):
        assert mixed[at].tolist() == pytest.approx(logits[number].tolist(), abs=1e-3)
