"""What passages say for an answer: the share of its words that one holds, and the sentence that decides a question."""

from __future__ import annotations

import pytest

from ragkv.engine.support import deciding_sentence, held_share, sentences, stems


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Ada Brook", 1.0),
        ("Ada Stone", 0.5),
        ("Otto", 0.0),
        ("bridges", 1.0),
        ("18", 0.0),
        ("1889.", 1.0),
        ("...", 0.0),
        ("塔恩港", 1.0),
    ],
)
def test_the_share_of_an_answer_that_one_passage_holds(answer: str, share: float) -> None:
    assert held_share(answer, ["Ada Brook built the bridge in 1889.", "A stone. 布鲁克建造了塔恩港。"]) == share


def test_a_question_is_told_by_the_words_that_name_something() -> None:
    assert stems("What was it built for, and by whom?") == {"built"}
    assert stems("Which lighthouses?") == {"light"}


def test_the_sentence_with_most_of_the_question_decides() -> None:
    texts = ["Tarn lies north. The mill of Tarn was sold.", "The mill of Tarn was never sold to Otto."]
    number, start, end = deciding_sentence("Was the mill of Tarn sold to Otto?", texts) or (0, 0, 0)
    assert texts[number][start:end] == texts[1]
    assert deciding_sentence("Was the tower painted by Vala?", texts) is None
    assert deciding_sentence("Was it?", texts) is None


def test_a_row_of_a_table_is_one_sentence() -> None:
    text = "## Clothing\n\nArticle: Boots\nPrice: 39.90\n\nArticle: Hat\nPrice: 14\nSold out"
    found = [text[start:end] for start, end in sentences(text)]
    assert found == ["## Clothing", "Article: Boots\nPrice: 39.90", "Article: Hat\nPrice: 14", "Sold out"]


def test_a_line_ends_a_sentence_unless_words_go_on() -> None:
    text = "Quay 7\nOrrin\n\nThe ferry\nleaves at noon."
    assert [text[slice(*span)] for span in sentences(text)] == ["Quay 7", "Orrin", "The ferry\nleaves at noon."]
