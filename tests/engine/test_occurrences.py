"""Words are found where they stand alone: not inside of a number, an identifier or an address."""

from __future__ import annotations

import pytest

from ragkv.engine.occurrences import occurrences, words_of


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("SORTER(1)  Commands", "1"),
        ("a count of -1 is infinity", "1"),
        ("at −12 degrees", "12"),
        ("release 3.1 of it", "1"),
        ("release 3.1 of it", "3"),
        ("it reads 1,000 lines", "1"),
        ("it cost 48 000 crowns", "48"),
        ("it cost 48\n000 crowns", "000"),
        ("10^6 litres", "10"),
        ("at 10:30 sharp", "10"),
        ("take 1/2 tablet", "2"),
        ("call 555-123-4567", "123"),
        ("the pump X-200", "200"),
        ("written in C++ or C#", "C"),
        ("include pump.h first", "pump"),
        ("write to orla@ink.example.", "orla"),
        ("see https://ink.example/orla/1", "orla"),
        ("in /etc/pump/rules", "pump"),
        ("as shown [3] before", "3"),
        ("2. Open the valve.", "2"),
        ("pump_2 runs", "2"),
    ],
)
def test_a_part_of_a_number_or_an_identifier_is_no_occurrence(text: str, word: str) -> None:
    assert occurrences(text, [word]) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The exit status is 1 if no line is selected.", "1"),
        ("It ends with 1.", "1"),
        ("1, 2 and 3", "1"),
        ("about 40% of it", "40"),
        ("it cost $5", "5"),
        ("from 1990-1995", "1995"),
        ("pages 12–19", "19"),
        ("on 2020-11-12", "2020"),
        ("on 12/11/2020", "2020"),
        ("the 40-metre tower", "40"),
        ("by Anne-Marie and/or others", "Marie"),
        ("by Anne-Marie and/or others", "or"),
        ("a count of -1 is infinity", "-1"),
        ("release 3.1 of it", "3.1"),
        ("it cost 48\n000 crowns", "48 000"),
        ("SORTER(1)  Commands", "sorter"),
        ("the pump X-200.", "X-200"),
        ("written in C++.", "C++"),
        ("write to orla@ink.example.", "orla@ink.example"),
        ("include pump.h first", "pump.h"),
        ("the end.Then", "end"),
        ("Ada's bridge", "Ada"),
    ],
)
def test_a_whole_number_word_or_identifier_is_one(text: str, answer: str) -> None:
    ((start, end),) = occurrences(text, answer.split())
    assert " ".join(text[start:end].casefold().split()) == answer.casefold()


def test_a_number_or_an_identifier_is_one_of_the_words_of_a_text() -> None:
    assert words_of("Release 3.1 of PUMP(1) costs 1,000.") >= {"release", "3.1", "pump", "1,000"}
    assert not {"1", "3", "000"} & words_of("Release 3.1 of PUMP(1) costs 1,000.")
