"""Characters that nobody sees, or that look alike, hide no word from search, and are not read by the model."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragkv.normalisation import fold_with_offsets, folded, normal_id, numbers, searchable, visible

MARKS = "aé e\u0301\u200b\u200d\xadกខ\ufb01Ａ1 각가\u1100\u1161\u11a8\u0958\u09c7\u09be\u2126ｶﾞ\ufe0f👩💻…“"
TEXTS = st.text(st.sampled_from(MARKS), max_size=12)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("ware\xadhouse", "warehouse"),
        ("the ware\xad\n  house", "the warehouse"),
        ("Ma\u200bthil\u2060de", "Mathilde"),
        ("Ka\u200ctri\u200dna", "Katrina"),
        ("\u202agate\u202c \u2066seven\u2069\u200f", "gate seven"),
        ("seven\U000e0041\U000e0042", "seven"),
        ("plain", "plain"),
        ("ﬁre, 48\u202f000, ｆｕｌｌ", "ﬁre, 48\u202f000, ｆｕｌｌ"),  # what is seen stays as it is
    ],
)
def test_invisible_characters_that_mean_nothing_are_left_out(text: str, seen: str) -> None:
    assert visible(text) == seen


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",  # Persian: the letter before it has its final form
        "क्\u200dष",  # Hindi: a half form
        "👩\u200d💻",  # one picture of two
        "❤\ufe0f\u200d🔥",
        "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # the flag of England
        "ស្រី\u200bស្អាត",  # Khmer: where a word ends
    ],
)
def test_invisible_characters_that_mean_something_stay(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("\ufb01re", "fire"),
        ("ｗａｒｅ　１２", "ware 12"),
        ("ｶﾞｽ", "ガス"),
        ("cafe\u0301", "café"),
        ("H₂O", "H2O"),
        ("x\xa0y", "x y"),
        ("mi\u200bll", "mill"),
        ("می\u200cخواهم", "میخواهم"),
        ("ស្រី\u200bស្អាត", "ស្រី ស្អាត"),
        ("10⁶, 1½, ①", "10⁶, 1½, ①"),  # 106, 11/2 and 1 say something else
        ("Wait… “so”", "Wait… “so”"),
    ],
)
def test_texts_are_compared_in_one_form(text: str, read: str) -> None:
    assert folded(text) == read


@pytest.mark.parametrize(
    "text", ["48 000", "48,000", "48'000", "48’000", "48\u2009000", "48\xa0000", "48\u202f000", "48.000", "48_000"]
)
def test_a_number_in_groups_is_also_one_word(text: str) -> None:
    assert searchable(f"It cost {text} crowns.").split()[-1] == "48000"


def test_only_figures_that_may_be_one_number_are_joined() -> None:
    assert [figures for _, figures in numbers("1,234,567 of 1,00,000 in 2024, 12 34, 1234,567 and 5 crowns")] == [
        "1234567",
        "100000",
    ]
    assert searchable("rooms 101 102") == "rooms 101 102 101102", "the rooms are found, too"


def test_an_id_has_one_form() -> None:
    assert normal_id("notes/Cafe\u0301 ware\xadhouse.md") == "notes/Café warehouse.md"
    assert normal_id("ﬁre.md") == "ﬁre.md", "it looks different, so it is another name"


@given(TEXTS)
@example("กข\u200bข e\u0301")
def test_offsets_lead_from_the_folded_text_to_the_text(text: str) -> None:
    read, offsets = fold_with_offsets(text)
    assert read == folded(text)
    if offsets is None:
        assert len(read) == len(text)
    else:
        assert len(offsets) == len(read) + 1
        assert offsets[-1] == len(text)
        assert (offsets[1:] >= offsets[:-1]).all()


@given(TEXTS)
def test_a_second_time_changes_nothing(text: str) -> None:
    assert folded(folded(text)) == folded(text)
    assert visible(visible(text)) == visible(text)


def test_offsets_name_the_character_that_a_letter_comes_from() -> None:
    read, offsets = fold_with_offsets("a\xad ﬁre e\u0301x")
    assert offsets is not None
    assert list(zip(read, offsets.tolist(), strict=False)) == [
        *(("a", 0), (" ", 2), ("f", 3), ("i", 3), ("r", 4), ("e", 5), (" ", 6), ("é", 7), ("x", 9)),
    ]
