"""Exact match and F1 against values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.evaluation.score import exact_match, f1, normalise, tokens

TEXT = st.text(alphabet="ab the,.!\tÄé7", max_size=30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat!", "cat"),
        ("an apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("state-of-the-art", "stateoftheart"),
        ("  \t", ""),
        ("Zürich", "zürich"),
        ("the", ""),
    ],
)
def test_normalising_drops_case_punctuation_articles_and_spaces(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "em", "score"),
    [
        ("The Eiffel Tower.", ["eiffel tower"], 1.0, 1.0),
        ("Eiffel", ["Eiffel Tower"], 0.0, 2 / 3),
        ("in the year 1889", ["1889"], 0.0, 0.5),
        ("cat cat dog", ["cat dog dog"], 0.0, 2 / 3),
        ("Paris", ["London"], 0.0, 0.0),
        ("", ["London"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),
        ("London", [], 0.0, 0.0),
        ("red fox", ["blue bird", "red fox jumps", "fox"], 0.0, 0.8),
        ("fox", ["blue bird", "The Fox"], 1.0, 1.0),
    ],
)
def test_the_best_alias_gives_the_score(answer: str, gold: list[str], em: float, score: float) -> None:
    assert exact_match(answer, gold) == em
    assert f1(answer, gold) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("北京，上海。", ["北", "京", "上", "海"]),
        ("2019年iPhone 11发布", ["2019", "年", "iphone", "11", "发", "布"]),
        ("ＡＢ ３.5％", ["ab", "3", "5"]),
        ("“鲁迅”（周树人）", ["鲁", "迅", "周", "树", "人"]),
        ("the 𠮷", ["the", "𠮷"]),
        (" 、 ", []),
    ],
)
def test_chinese_is_counted_by_characters(text: str, expected: list[str]) -> None:
    assert tokens(text, "zh") == expected


@pytest.mark.parametrize(
    ("answer", "gold", "em", "score"),
    [
        ("北京。", ["北京"], 1.0, 1.0),
        ("在北京", ["北京"], 0.0, 0.8),
        ("上海市", ["北京", "上海"], 0.0, 0.8),
        ("2019 年", ["2019年"], 1.0, 1.0),
        ("广州", ["北京"], 0.0, 0.0),
        ("鲁迅", [], 0.0, 0.0),
    ],
)
def test_chinese_answers_are_scored_by_characters(answer: str, gold: list[str], em: float, score: float) -> None:
    assert exact_match(answer, gold, "zh") == em
    assert f1(answer, gold, "zh") == pytest.approx(score)


@given(TEXT, TEXT)
def test_f1_is_symmetric_and_one_exactly_for_the_same_bag_of_words(left: str, right: str) -> None:
    score = f1(left, [right])
    assert 0.0 <= score <= 1.0
    assert score == f1(right, [left])
    assert (score == 1.0) == (sorted(normalise(left).split()) == sorted(normalise(right).split()))


@given(TEXT, st.lists(TEXT, max_size=4), TEXT)
def test_one_more_alias_never_lowers_a_score(answer: str, gold: list[str], more: str) -> None:
    assert exact_match(answer, [*gold, more]) >= exact_match(answer, gold)
    assert f1(answer, [*gold, more]) >= f1(answer, gold)
