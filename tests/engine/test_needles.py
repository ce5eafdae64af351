from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ragkv.engine.needles import NeedleSet, make_needles, span_tokens
from ragkv.errors import InputError

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"


def count_words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def hundred() -> NeedleSet:
    """Return the set that benches use: 100 questions over 8 documents of about 512 tokens."""
    return make_needles(7, documents=8, tokens=350, count=100, length=count_words)


@given(seed=st.integers(), documents=st.integers(1, 9), tokens=st.integers(120, 600), each=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_spans_are_exact_and_answers_occur_once_in_the_whole_set(
    seed: int, documents: int, tokens: int, each: int
) -> None:
    needles = make_needles(seed, documents, tokens, documents * each, count_words)
    texts = {document.id: document.text for document in needles.documents}
    whole = "\n".join(f"{document.title}\n{document.text}" for document in needles.documents)
    assert len(texts) == documents
    assert len(needles.questions) == documents * each
    for question in needles.questions:
        text = texts[question.document_id]
        assert text[question.start : question.end] == question.answer
        assert question.depth == question.start / len(text)
        assert whole.lower().count(question.answer.lower()) == 1
        assert question.answer not in question.question
    assert len({question.question for question in needles.questions}) == len(needles.questions)


@given(seed=st.integers(), tokens=st.integers(100, 3000))
@settings(max_examples=30, deadline=None)
def test_documents_are_close_to_the_length_asked_for_and_never_longer(seed: int, tokens: int) -> None:
    needles = make_needles(seed, 4, tokens, 4, count_words)
    for document in needles.documents:
        assert 0.9 * tokens <= count_words(document.text) <= tokens


def test_the_length_is_counted_by_the_callers_tokenizer(tokenizer: Tokenizer) -> None:
    needles = make_needles(3, 8, 500, 100, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))
    for document in needles.documents:
        assert 475 <= len(tokenizer.encode(document.text, add_special_tokens=False).ids) <= 505


def test_a_seed_gives_the_same_set_again_and_another_seed_another_set() -> None:
    first = make_needles(1, 4, 200, 20, count_words)
    assert make_needles(1, 4, 200, 20, count_words) == first
    other = make_needles(2, 4, 200, 20, count_words)
    assert {document.title for document in other.documents}.isdisjoint(document.title for document in first.documents)
    assert {document.id for document in other.documents}.isdisjoint(document.id for document in first.documents)


def test_answers_are_spread_evenly_over_depth(hundred: NeedleSet) -> None:
    depths = sorted(question.depth for question in hundred.questions)
    for rank, depth in enumerate(depths):
        assert depth == pytest.approx((rank + 0.5) / 100, abs=0.1)


def test_every_document_has_the_same_number_of_questions(hundred: NeedleSet) -> None:
    documents = [question.document_id for question in hundred.questions]
    assert {documents.count(document.id) for document in hundred.documents} == {12, 13}


def test_the_first_questions_are_not_the_shallow_ones(hundred: NeedleSet) -> None:
    first = [question.depth for question in hundred.questions[:25]]
    assert max(first) - min(first) > 0.6


def test_a_coref_sentence_does_not_name_its_subject_and_the_others_do(hundred: NeedleSet) -> None:
    documents = {document.id: document for document in hundred.documents}
    for question in hundred.questions:
        document = documents[question.document_id]
        begin = document.text.rfind(". ", 0, question.start) + 1
        sentence = document.text[begin : document.text.index(".", question.end)]
        subject = document.title.removeprefix("The ")
        assert subject in question.question
        assert (subject in sentence) == (question.kind == "one")
    assert {question.kind for question in hundred.questions} == {"one", "coref"}


def test_documents_of_one_kind_compete_for_the_same_question(hundred: NeedleSet) -> None:
    titles = [document.title.removeprefix("The ") for document in hundred.documents]
    shapes: dict[str, int] = {}
    for question in hundred.questions:
        subject = next(title for title in titles if title in question.question)
        shape = question.question.replace(subject, "X")
        shapes[shape] = shapes.get(shape, 0) + 1
    assert sum(count for count in shapes.values() if count > 1) > 50


def test_the_text_is_plain_ascii_without_empty_slots(hundred: NeedleSet) -> None:
    for document in hundred.documents:
        assert document.text.isascii()
        assert document.text.isprintable()
        assert not set("{}|*") & set(document.text)
        assert "  " not in document.text


@pytest.mark.parametrize(("documents", "tokens", "count"), [(0, 300, 1), (1, 300, 0), (1, 8, 1), (8, 350, 200)])
def test_impossible_sets_are_refused(documents: int, tokens: int, count: int) -> None:
    with pytest.raises(InputError):
        make_needles(0, documents, tokens, count, count_words)


@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_of_a_span_decode_to_the_answer(seed: int, tokenizer: Tokenizer) -> None:
    needles = make_needles(seed, 4, 250, 30, count_words)
    encoded = {document.id: tokenizer.encode(document.text) for document in needles.documents}
    for question in needles.questions:
        encoding = encoded[question.document_id]
        indexes = span_tokens(encoding.offsets, question.start, question.end)
        assert indexes == tuple(range(indexes[0], indexes[-1] + 1))
        assert tokenizer.decode([encoding.ids[index] for index in indexes]).strip(" .,") == question.answer


def test_special_tokens_without_text_belong_to_no_span() -> None:
    assert span_tokens([(0, 0), (0, 4), (4, 9), (9, 9), (9, 12)], 3, 9) == (1, 2)
    assert span_tokens([(0, 0), (0, 4)], 0, 4) == (1,)
