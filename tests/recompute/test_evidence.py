"""Evidence: kinds on one scale, joined to the logits of blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.recompute.evidence import (
    OWN_TITLE,
    WEIGHTS,
    BlockEvidence,
    evidence_logits,
    inverse_frequencies,
    standardised,
    title_links,
)

KINDS = ("meaning", "words", "links")


def told(meaning, *words, named=(), title=()):
    """Return evidence of a chunk; words, named: which windows have each word; title: which of the names it has."""
    flags, names = (
        torch.tensor([[window in mine for mine in some] for window in range(len(meaning))])
        .reshape(len(meaning), len(some))
        .bool()
        for some in (words, named)
    )
    return BlockEvidence(torch.tensor(meaning), flags, names, torch.tensor(title, dtype=torch.bool))


def test_a_rare_word_counts_for_more_than_a_common_one_and_one_that_is_everywhere_for_nothing():
    present = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]]).bool()
    expected = [math.log(4 / 2) ** 2 + math.log(4 / 3) ** 2, math.log(4 / 3) ** 2, 0.0]
    torch.testing.assert_close(inverse_frequencies(present), torch.tensor(expected))


def test_each_kind_is_standardised_over_all_blocks_of_the_context():
    found = [told([0.1, 0.5], {1}), told([0.3], set())]
    meaning = torch.tensor([0.1, 0.5, 0.3])
    words = torch.tensor([0.0, math.log(2) ** 2, 0.0])
    z = [(each - each.mean()) / each.std(correction=0) for each in (meaning, words)]
    joined = WEIGHTS["meaning"] * z[0] + WEIGHTS["words"] * z[1]
    torch.testing.assert_close(evidence_logits(found, ("meaning", "words")), joined)
    torch.testing.assert_close(evidence_logits(found, ("words",)), WEIGHTS["words"] * z[1])
    assert evidence_logits(found, ("attention",)).tolist() == [0, 0, 0], "a pass of the model is not evidence here"


def test_what_tells_no_blocks_apart_says_nothing():
    assert standardised(torch.full((3,), 0.4)).tolist() == [0, 0, 0]
    assert evidence_logits([told([0.4, 0.4]), told([0.4])], ("meaning", "words")).tolist() == [0, 0, 0]


def test_a_chunk_is_linked_to_the_strongest_window_that_has_its_title():
    """Two names: the second chunk is called by the first of them, the third one by both."""
    first = told([0.9, 0.1, 0.0], named=({0}, {1}), title=(False, False))
    second, third = (told([0.0, 0.0], named=((), ()), title=mine) for mine in ((True, False), (True, True)))
    links = title_links([first, second, third], torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert links.tolist() == pytest.approx([0, 0, 0, 1, 1, 0.5, 0.5]), "a weaker window counts for less"
    weak = title_links([first, second, third], torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert weak.tolist() == pytest.approx([0, 0, 0, *[math.exp(-2)] * 2, 0.5, 0.5])
    alike = title_links([second, third], torch.zeros(4))
    assert alike.tolist() == pytest.approx([OWN_TITLE, OWN_TITLE, OWN_TITLE / 2, OWN_TITLE / 2])
    assert title_links([first, second], torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0]))[3] < 1e-3, "its own windows"


def test_a_title_that_the_question_has_or_nobody_names_links_nothing():
    found = [told([0.9, 0.1], title=()), told([0.2], title=())]
    assert title_links(found, torch.zeros(3)).tolist() == [0, 0, 0]
    unnamed = [told([0.9, 0.1], named=({},), title=(False,)), told([0.2], named=({},), title=(True,))]
    assert title_links(unnamed, torch.zeros(3)).tolist() == [0, 0, 0]
    everywhere = [told([0.9, 0.1], named=({0, 1},), title=(False,)), told([0.2], named=({0},), title=(True,))]
    assert title_links(everywhere, torch.zeros(3)).tolist() == [0, 0, 0], "a word of every window names nothing"


def naive_links(found, logits):
    """The formula, chunk by chunk, window by window, word by word."""
    windows = [(c, w) for c, mine in enumerate(found) for w in range(len(mine.meaning))]
    frequency = [sum(bool(found[c].named[w, u]) for c, w in windows) for u in range(found[0].named.shape[1])]
    rare = [math.log((len(windows) + 1) / (count + 1)) ** 2 for count in frequency]
    links = []
    for number, chunk in enumerate(found):
        mine = [u for u in range(len(rare)) if chunk.title[u]]
        best, total = 0.0, max(1e-6, sum(rare[u] for u in mine))
        for at, (c, w) in enumerate(windows):
            held = sum(rare[u] * max(float(found[c].named[w, u]), OWN_TITLE * float(found[c].title[u])) for u in mine)
            if c != number:
                best = max(best, held / total * math.exp(logits[at] - max(logits)))
        links += [best] * len(chunk.meaning)
    return links


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SIZES, st.integers(0, 6), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_links_are_those_of_plain_loops(sizes, words, seed):
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(shape, generator=random)  # noqa: E731
    found = [BlockEvidence(draw(n), draw(n, 2) > 0.5, draw(n, words) > 0.6, draw(words) > 0.5) for n in sizes]
    logits = 4 * draw(sum(sizes))
    assert title_links(found, logits).tolist() == pytest.approx(naive_links(found, logits.tolist()), abs=1e-4)
    without = evidence_logits(found, KINDS[:2])
    joined = without + WEIGHTS["links"] * title_links(found, without)
    torch.testing.assert_close(evidence_logits(found, KINDS), joined)


@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5), min_size=1, max_size=4), st.randoms())
@settings(max_examples=50, deadline=None)
def test_the_order_of_chunks_changes_no_logit(chunks, random):
    some = set(range(0, 5, 2))
    found = [told(meaning, some, named=(some, {1}), title=(i == 0, i % 2 == 1)) for i, meaning in enumerate(chunks)]
    order = random.sample(range(len(found)), len(found))
    logits = evidence_logits(found, KINDS).split([len(each) for each in chunks])
    mixed = evidence_logits([found[i] for i in order], KINDS).split([len(chunks[i]) for i in order])
    for at, number in enumerate(order):
        assert mixed[at].tolist() == pytest.approx(logits[number].tolist(), abs=1e-3)
