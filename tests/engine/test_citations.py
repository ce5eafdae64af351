"""Citations mark where an answer's words occur, by offsets into the document, and an unknown answer cites nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.engine.citations import MAX_MARKS, cite, mark
from ragkv.passages import is_unknown
from ragkv.types import Chunk, Hit, TextSpan

TEXT = 'The harbour was built by Ada\nBrook. It cost 40 marks. "Ada Brook?" asked Otto. Adaline left.'


def chunk(text: str = TEXT, offset: int = 100) -> Chunk:
    return Chunk("d#2", "d", 2, "Title", text, (1,), TextSpan(offset, offset + len(text), "Harbour", 4), 3)


def marked(answer: str, text: str = TEXT) -> list[tuple[str, str]]:
    """(marked text, its sentence) of each mark."""
    found = mark(chunk(text), answer)
    slices = [(m.start - 100, m.end - 100, m.sentence_start - 100, m.sentence_end - 100) for m in found]
    return [(text[a:b], text[c:d]) for a, b, c, d in slices]


def test_every_occurrence_is_marked_in_any_case_and_white_space_with_its_sentence() -> None:
    assert marked("ada brook.") == [
        ("Ada\nBrook", "The harbour was built by Ada\nBrook."),
        ("Ada Brook", '"Ada Brook?"'),
    ]


def test_a_part_of_a_word_is_no_occurrence() -> None:
    assert [found for found, _ in marked("Ada")] == ["Ada", "Ada"]
    assert marked("4") == []


def test_words_in_another_order_mark_the_sentence_that_has_all_of_them() -> None:
    assert marked("built by Brook, the harbour") == []  # lines that are not wide end sentences
    assert marked("marks: 40 cost") == [("It cost 40 marks.", "It cost 40 marks.")]


def test_a_sentence_goes_on_over_a_line_that_was_wrapped() -> None:
    wrapped = (
        "The harbour of Tarn was built by the engineer Ada Maria\nBrook of Lindmouth, who\nlived there. It is old."
    )
    assert marked("Ada Maria Brook", wrapped) == [("Ada Maria\nBrook", wrapped[:92])]
    assert marked("lived who harbour", wrapped) == [(wrapped[:92], wrapped[:92])]
    assert marked("Mill Lane 7", "7 Mill Lane\nOrrin") == [("7 Mill Lane", "7 Mill Lane")]


def test_all_words_of_a_number_are_needed_as_one() -> None:
    assert marked("3.1", "There are 3 pumps and 1 valve.") == []


STATUS = "What is the exit status of sorter if no lines are selected?"


def answered(answer: str, question: str, *texts: str) -> list[list[str]]:
    """What is marked in each text."""
    hits = [
        Hit(Chunk(f"d{n}#0", f"d{n}", 0, "", text, (1,), TextSpan(0, len(text))), 0.5) for n, text in enumerate(texts)
    ]
    return [
        [text[m.start : m.end] for m in c.marks] for text, c in zip(texts, cite(hits, answer, question), strict=True)
    ]


def test_a_small_number_is_marked_on_the_answer_itself() -> None:
    found = answered(
        "1",
        STATUS,
        "The exit status of sorter is 1 if no lines were selected.",
        "SORTER(1)  User Commands. The lines were selected.",
        "A NUM of -1 is treated as infinity by sorter, if no lines are selected.",
        "Version 3.1 of sorter prints lines.",
        "sorter reads 1,000 lines.",
        "There is 1 boat in the harbour.",
    )
    assert found == [["1"], [], [], [], [], []]
    assert answered("1", "How many?", "There is 1 boat in the harbour.") == [["1"]]


def test_the_sentence_that_decides_is_marked_for_yes_and_no_or_nothing() -> None:
    texts = ("Tarn is old. The harbour of Tarn is dredged every spring.", "Yes, no, and so on. The mill is closed.")
    assert answered("yes", "Is the harbour of Tarn dredged?", *texts) == [
        ["The harbour of Tarn is dredged every spring."],
        [],
    ]
    assert answered("No.", "Did the mayor of Orrin resign?", *texts) == [[], []]


@pytest.mark.parametrize("answer", ["yes", "No.", "", "...", "nobody"])
def test_judgements_and_absent_words_mark_nothing(answer: str) -> None:
    assert marked(answer, f"Yes, no, and so on. {TEXT}") == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [("Mathilde", "Ma\u200bthil\xadde"), ("fire exit", "ﬁre\xa0exit"), ("café", "cafe\u0301"), ("ware", "ｗａｒｅ")],
)
def test_an_answer_is_marked_where_the_text_says_it_in_another_form(answer: str, said: str) -> None:
    text = f"It is {said}. No more."
    assert marked(answer, text) == [(said, f"It is {said}.")]


def test_a_sign_is_marked_in_a_sentence_and_not_where_it_stands_alone() -> None:
    assert marked("}", "int main() {\n}\n\nA block ends with }.\n\n}") == [("}", "A block ends with }.")]


def test_a_repeated_answer_has_a_bounded_number_of_marks() -> None:
    assert len(mark(chunk("green " * 50), "green")) == MAX_MARKS


def test_a_chunk_whose_place_is_not_known_is_cited_without_marks() -> None:
    unplaced = Chunk("d#0", "d", 0, "Title", TEXT, (1,))
    (citation,) = cite([Hit(unplaced, 0.5)], "Ada Brook")
    assert (citation.start, citation.marks, citation.text) == (None, (), TEXT)


def test_a_citation_names_version_chunk_heading_page_and_characters() -> None:
    (citation,) = cite([Hit(chunk(), 0.5)], "40 marks")
    assert (citation.document_id, citation.version, citation.chunk, citation.heading, citation.page) == (
        *("d", 3, 2, "Harbour", 4),
    )
    assert (citation.start, citation.end, citation.text) == (100, 100 + len(TEXT), TEXT)
    assert len(citation.marks) == 1


def test_a_citation_names_the_heading_above_its_first_mark() -> None:
    text = "The crane is old.\n\n## Cranes\n\nIt lifts ten tons.\n\n## Mills\n\nThe mill lifts two sacks."
    found = {
        answer: cite([Hit(chunk(text), 1.0)], answer)[0].heading for answer in ("old", "ten tons", "two sacks", "no")
    }
    assert found == {"old": "Harbour", "ten tons": "Cranes", "two sacks": "Mills", "no": "Harbour"}


def test_a_citation_names_the_page_of_its_first_mark() -> None:
    text = "Six lamps.\n\nSeven mills.\n\nEight cranes."
    pages = ((100 + text.index("Seven"), 5), (100 + text.index("Eight"), 7))
    placed = Chunk("d#2", "d", 2, "Title", text, (1,), TextSpan(100, 100 + len(text), "", 4, pages))
    found = {answer: cite([Hit(placed, 1.0)], answer)[0].page for answer in ("six", "seven", "eight", "nine")}
    assert found == {"six": 4, "seven": 5, "eight": 7, "nine": 4}


def test_of_several_marks_the_page_is_that_of_the_sentence_that_is_asked_for() -> None:
    text = "The yard has forty cranes.\n\n## Mills\n\nThe dale has forty mills."
    placed = Chunk("d#2", "d", 2, "Title", text, (1,), TextSpan(0, len(text), "Yard", 4, ((text.index("##"), 5),)))
    asked = {
        question: (citation.page, citation.heading, len(citation.marks))
        for question in ("How many cranes?", "How many mills has the dale?", "")
        for citation in cite([Hit(placed, 1.0)], "forty", question)
    }
    assert asked == {
        "How many cranes?": (4, "Yard", 2),
        "How many mills has the dale?": (5, "Mills", 2),
        "": (4, "Yard", 2),
    }


@pytest.mark.parametrize(("answer", "unknown"), [("unknown", True), (" Unknown. ", True), ("unknown sailor", False)])
def test_an_unknown_answer_cites_nothing(answer: str, unknown: bool) -> None:
    assert is_unknown(answer) == unknown
    assert (cite([Hit(chunk(), 0.5)], answer) == ()) == unknown


@given(st.text(max_size=200), st.text(max_size=30))
def test_marks_lie_inside_their_sentence_and_the_chunk(text: str, answer: str) -> None:
    for found in mark(chunk(text), answer):
        assert 100 <= found.sentence_start <= found.start < found.end <= found.sentence_end <= 100 + len(text)
