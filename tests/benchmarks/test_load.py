"""The load of `bench serve`: seeded, Poisson, Zipf, from documents or from a file."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.load import (
    QUOTED_WORDS,
    PlannedQuestion,
    arrive,
    distinguishing_key,
    draw,
    quoting_questions,
    read_questions,
    repeat,
    zipf_shares,
)
from ragkv.errors import InputError

ASKED = [PlannedQuestion(f"question {i}") for i in range(2000)]


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    texts = [["one two three", "four five six"]] * 40
    for make in (
        lambda seed: arrive(ASKED, 5.0, seed),
        lambda seed: draw(50, 40, 3, 1.0, seed),
        lambda seed: quoting_questions(texts, seed),
        lambda seed: repeat(ASKED, 40, 1.0, seed),
    ):
        assert make(7) == make(7)
        assert make(7) != make(8)


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    times = [0.0, *(question.at for question in arrive(ASKED, 5.0, 1) if question.at is not None)]
    gaps = sorted(late - early for early, late in pairwise(times))
    assert len(gaps) == len(ASKED)
    assert gaps[0] > 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 5, rel=0.1)
    # The median of an exponential distribution is ln 2 times its mean.
    assert gaps[len(gaps) // 2] == pytest.approx(0.6931 / 5, rel=0.1)


def test_another_rate_asks_the_same_questions_at_other_times() -> None:
    slow, fast = arrive(ASKED, 1.0, 3), arrive(ASKED, 10.0, 3)
    assert [each.text for each in slow] == [each.text for each in fast]
    assert [each.at for each in slow if each.at] == pytest.approx([10 * each.at for each in fast if each.at])


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_documents_are_drawn_by_the_shares_of_zipf(exponent: float) -> None:
    drawn = Counter(item for (item,) in draw(20, 20_000, 1, exponent, 5))
    found = sorted((drawn[item] / 20_000 for item in range(20)), reverse=True)
    assert found == pytest.approx(zipf_shares(20, exponent), abs=0.01)
    assert zipf_shares(4, 1.0) == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])


def test_a_popular_document_is_another_one_with_another_seed() -> None:
    favourites = {Counter(item for (item,) in draw(20, 500, 1, 1.5, seed)).most_common(1)[0][0] for seed in range(8)}
    assert len(favourites) > 3


def test_the_documents_of_a_question_differ() -> None:
    drawn = draw(5, 200, 3, 2.0, 1)
    assert all(len(set(each)) == 3 for each in drawn)
    assert {item for each in drawn for item in each} == set(range(5))
    assert sorted(draw(5, 1, 5, 2.0, 1)[0]) == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="over 6 documents needs as many, there are 5"):
        draw(5, 1, 6, 1.0, 1)


def test_a_question_quotes_consecutive_words_of_a_chunk() -> None:
    long, short = " ".join(f"word{i}" for i in range(40)), "too short"
    for asked, chunk in zip(quoting_questions([[long], [short]] * 20, 1), [long, short] * 20, strict=True):
        quoted = asked.partition('"')[2].rpartition('"')[0]
        assert quoted in chunk
        assert len(quoted.split()) == min(QUOTED_WORDS, len(chunk.split()))
    assert len(set(quoting_questions([[long]] * 20, 1))) > 10


def test_questions_of_a_file_are_asked_in_order_or_by_popularity() -> None:
    assert [each.text for each in repeat(ASKED[:3], 5, 0.0, 1)] == [f"question {i}" for i in (0, 1, 2, 0, 1)]
    found = sorted(Counter(each.text for each in repeat(ASKED[:3], 3000, 1.0, 1)).values(), reverse=True)
    assert [count / 3000 for count in found] == pytest.approx(zipf_shares(3, 1.0), abs=0.03)


def test_a_file_names_questions_documents_and_arrivals(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"question": "Why?", "documents": ["a", "b"], "at": 0}\n\n{"question": "When?", "at": 1.5}\n')
    assert read_questions(path) == [PlannedQuestion("Why?", ("a", "b"), 0), PlannedQuestion("When?", (), 1.5)]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["{"], ":1: not JSON"),
        ([{"q": "Why?"}], ":1: a line is"),
        ([{"question": "Why?"}, {"question": "When?", "documents": "a"}], ':2: "documents" must be'),
        ([{"question": "Why?", "documents": [str(i) for i in range(65)]}], ":1: 64 documents at most"),
        ([{"question": "Why?", "at": -1}], ':1: "at" must be'),
        ([{"question": "Why?", "at": True}], ':1: "at" must be'),
        ([{"question": "Why?", "at": 1}, {"question": "When?"}], "either every line"),
        ([{"question": "Why?", "at": 2}, {"question": "When?", "at": 1}], "never decreases"),
        ([], "no questions"),
    ],
)
def test_a_file_that_is_no_load_is_refused(tmp_path, lines, fault) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    with pytest.raises(InputError, match=fault):
        read_questions(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "nowhere")


def test_documents_are_told_apart_by_a_key_that_has_another_value_in_each() -> None:
    assert distinguishing_key([{"kind": "a", "place": "x", "z": 1}, {"kind": "a", "place": "y", "z": 2}]) == "place"
    for alike in ([{"kind": "a"}, {"kind": "a"}], [{"a": 1}, {"b": 2}], [{"a": [1]}, {"a": [2]}], [{}]):
        with pytest.raises(InputError, match="needs a key whose value is another one"):
            distinguishing_key(alike)
