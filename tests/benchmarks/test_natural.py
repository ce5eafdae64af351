"""The natural set keeps its promises: golds stand where they should, and contexts hold what their questions need."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.natural import natural_sets, page_questions, pages
from ragkv.evaluation.score import normalise

BY_ID = {page.id: page for page in pages()}


def test_the_natural_set_is_as_large_as_it_is_said_to_be():
    kinds = Counter(question.kind for question in page_questions())
    assert len(pages()) >= 40
    assert len({page.genre for page in pages()}) >= 8
    assert kinds.total() >= 300
    assert set(kinds) == {"one", "coref", "two", "none"}
    assert min(kinds.values()) >= 40


def test_ids_and_questions_are_unique():
    assert len(BY_ID) == len(pages())
    assert len({question.q.lower() for question in page_questions()}) == len(page_questions())


@pytest.mark.parametrize("question", page_questions(), ids=lambda question: question.q)
def test_gold_answers_stand_in_the_documents_of_their_question(question):
    assert question.q.strip().endswith("?")
    assert all(name in BY_ID for name in question.documents)
    text = "\n".join(piece for name in question.documents for piece in BY_ID[name].pieces)
    if question.kind == "none":
        assert question.a == ("unknown",)
    else:
        assert question.a[0] in text
        assert "unknown" not in map(normalise, question.a)
        assert 1 <= len(question.a[0].split()) <= 8


@pytest.mark.parametrize("chunks", [8, 24])
def test_contexts_hold_all_that_their_questions_need(chunks):
    sets = natural_sets(chunks)
    asked = [question for each in sets for question in each.questions]
    assert sorted(q.text for q in asked) == sorted(q.q for q in page_questions())
    needed = {
        q.q: [(BY_ID[name].title, piece) for name in q.documents for piece in BY_ID[name].pieces]
        for q in page_questions()
    }
    for each in sets:
        assert len(each.chunks) == chunks
        for question in each.questions:
            assert set(needed[question.text]) <= set(each.chunks)
            if question.span:
                text = each.chunks[question.span.chunk][1]
                assert text[question.span.start : question.span.end] == question.gold[0]


def test_pieces_of_a_document_keep_their_order():
    for each in natural_sets(24):
        for page in pages():
            places = [
                each.chunks.index((page.title, piece)) for piece in page.pieces if (page.title, piece) in each.chunks
            ]
            assert places == sorted(places)


def test_the_same_seed_gives_the_same_contexts():
    assert natural_sets(8, seed=3) == natural_sets(8, seed=3)
    assert natural_sets(8, seed=3) != natural_sets(8, seed=4)
