"""An answer that a line break ends in the middle of a value gets the rest of it; any other answer stays as it is."""

from __future__ import annotations

import pytest

from ragkv.engine.whole_values import whole_value

WRAPPED = (
    "The price of the bridge was 48\n000 crowns in the end, not more than that.\n"
    "The harbour of Tarn was built by the famous engineer Ada Maria\nBrook of Lindmouth in the year 1889."
)
OFFICES = (
    "Our office in Tarn:\n\n12 Quay Street\nTarn TN4 2AB\nNorthshire\n\n"
    "Our office in Orrin:\n\n7 Mill Lane,\nOrrin OR1\n"
)
CRANE = "Machine: Crane\nMaker: Lind and Sons\nSerial: A-77-\n1209\nPhone: +44 20 7946\n0018\nBought: 2019\n1250 kg"
COMMANDS = "To start, run:\n\n```\npump init --slow \\\n    --valve 7\npump start\n```\n"
POEM = "The heron stands in water grey,\nAnd waits until the close of day."
ROWS = "Name: Vala Ohm\nTown: Orrin\n\nName: Timo Rask\nTown: Tarn"


@pytest.mark.parametrize(
    ("answer", "question", "text", "whole"),
    [
        ("48", "What was the price?", WRAPPED, "48 000"),
        ("Ada Maria", "Who built the harbour?", WRAPPED, "Ada Maria Brook"),
        ("A-77-", "What is the serial number?", CRANE, "A-77-1209"),
        ("+44 20 7946", "What is the phone number?", CRANE, "+44 20 7946 0018"),
        (
            "12 Quay Street",
            "What is the address of the office in Tarn?",
            OFFICES,
            "12 Quay Street\nTarn TN4 2AB\nNorthshire",
        ),
        ("7 Mill Lane", "What is the address in Orrin?", OFFICES, "7 Mill Lane,\nOrrin OR1"),
        ("pump init", "Which command initialises the pump?", COMMANDS, "pump init --slow \\\n    --valve 7"),
    ],
)
def test_a_value_that_a_line_break_divides_is_whole(answer: str, question: str, text: str, whole: str) -> None:
    assert whole_value(answer, question, [text]) == whole


@pytest.mark.parametrize(
    ("answer", "question", "text"),
    [
        ("48 000", "What was the price?", WRAPPED),
        ("Lind and Sons", "Who is the maker?", CRANE),
        ("2019", "When was it bought?", CRANE),
        ("12 Quay Street", "Where is the office in Tarn?", OFFICES),
        ("12 Quay Street", "What is the e-mail address?", OFFICES),
        ("Northshire", "What is the address?", OFFICES),
        ("stands in water grey", "What does the heron do?", POEM),
        ("pump start", "How is the pump started?", COMMANDS),
        ("--slow", "Which option is used?", COMMANDS),
        ("Vala Ohm", "Who lives in Orrin?", ROWS),
        ("Orrin", "Where does Vala Ohm live?", ROWS),
        ("unknown", "Who?", POEM),
        ("", "Who?", POEM),
    ],
)
def test_an_answer_that_is_whole_stays_as_it_is(answer: str, question: str, text: str) -> None:
    assert whole_value(answer, question, [text]) == answer


def test_an_answer_that_stands_somewhere_without_the_break_is_whole() -> None:
    assert whole_value("Ada Maria", "Who?", [WRAPPED, "Ada Maria built it."]) == "Ada Maria"
