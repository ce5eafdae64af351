"""A question that names a row and a column of a table gets the cell where these meet, and nothing else is led."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.engine.table_lookup import cell_guide, looked_up
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.types import AskOptions, Chunk, Document, Hit

DUCKS = "\n\n".join(
    f"Year: {year}\nFreshwater Ducks: {count}" for year, count in ((2021, 150), (2022, 170), (2023, 160))
)
STAFF = (
    "First Name: Roy\nLast Name: Berry\nCity: Lume\nE-mail: roy@lume.example\nPhone 1: 5550\nPhone 2: 7777\n\n"
    "First Name: Roy\nLast Name: Brook\nCity: Orrin\nE-mail: rb@orrin.example\nPhone 1: 1000\nPhone 2: 2000"
)
YARD = "Site | Chief | Opened (year)\nOrrin | Vala Venn | 1987\nLume | Timo Karr | 2003"
MAIL = "# The crane\n\nFrom: Vala Venn <vala@orrin.example>\nTo: timo@lume.example\nDate: Mon, 2 Nov 2026\n\nIt lifts."
CLUB = "Name: Venn, Dr\nSubscription Date: 2021-04-23\n\nName: Karr\nSubscription Date: 2020-01-01"
WIDE = "Unit | Crane | Pump\nWeight | 9 t | 2 t\nPrice | 48 000 | 900"
TEXTS = {"ducks": DUCKS, "staff": STAFF, "yard": YARD, "wide": WIDE, "mail": MAIL, "club": CLUB}


def hits(*names: str) -> list[Hit]:
    return [Hit(Chunk(f"{name}#0", name, 0, name, TEXTS[name], ()), 1.0) for name in names or TEXTS]


@pytest.mark.parametrize(
    ("question", "cell"),
    [
        ("How many freshwater ducks were observed in 2022?", "170"),
        ("How many freshwater ducks were there in 2023?", "160"),
        ("What is the e-mail address of Roy Berry?", "roy@lume.example"),
        ("In which city does Roy Brook live?", "Orrin"),
        ("Who is the chief of Lume?", "Timo Karr"),
        ("When was the site of Orrin opened?", "1987"),
        ("What is the price of the crane?", "48 000"),
        ("What is the weight of the pump?", "2 t"),
        ("When did Venn subscribe?", "2021-04-23"),
    ],
)
def test_a_cell_is_named_by_its_row_and_column(question: str, cell: str) -> None:
    assert looked_up(question, hits()) == cell


@pytest.mark.parametrize(
    "question",
    [
        "How many freshwater ducks were observed in 2018?",
        "How many freshwater ducks were observed in Orrin in 2022?",
        "How many more freshwater ducks were observed in 2022 than in 2021?",
        "In which year were the most freshwater ducks observed?",
        "How many freshwater ducks were observed in total up to 2022?",
        "Were 150 freshwater ducks observed in 2022?",
        "What is the phone number of Roy Berry?",
        "What is the e-mail address of Roy?",
        "Who is the chief of Tarn?",
        "Who opened the site of Orrin?",
        "How many people does the chief of Lume lead?",
        "Why was the site of Orrin opened?",
        "What did Vala Venn say about the price of the ferry to the old harbour?",
        "",
    ],
)
def test_what_is_not_certain_is_left_to_the_model(question: str) -> None:
    assert looked_up(question, hits()) == ""


@pytest.mark.parametrize(
    ("question", "cell"),
    [
        ("Who sent the mail about the crane?", "Vala Venn <vala@orrin.example>"),
        ("Who is the sender of the e-mail about the crane?", "Vala Venn <vala@orrin.example>"),
        ("To whom was the message about the crane sent?", "timo@lume.example"),
        ("Who received the mail about the crane?", "timo@lume.example"),
        ("When was the mail about the crane sent?", "Mon, 2 Nov 2026"),
        ("What does the mail about the crane say?", ""),
        ("Who sent the crane?", ""),
    ],
)
def test_headers_are_those_of_the_mail_that_is_found_first(question: str, cell: str) -> None:
    (mail,) = hits("mail")
    assert looked_up(question, [*hits("ducks", "yard"), replace(mail, score=2.0)]) == cell
    assert looked_up(question, [replace(hits("yard")[0], score=3.0), mail]) == ""


def test_rows_of_two_tables_that_say_different_things_are_left_to_the_model() -> None:
    other = Hit(Chunk("b#0", "b", 0, "b", DUCKS.replace("170", "171"), ()), 1.0)
    assert looked_up("How many freshwater ducks were observed in 2022?", [*hits("ducks"), other]) == ""
    same = Hit(Chunk("b#0", "b", 0, "b", DUCKS, ()), 1.0)
    assert looked_up("How many freshwater ducks were observed in 2022?", [*hits("ducks"), same]) == "170"


@pytest.fixture
def engine(model: DecoderModel, tmp_path: Path) -> Iterator[Engine]:
    before = model.profile
    with Engine.open(Settings(data=tmp_path, device="cpu")) as engine:
        for name, text in TEXTS.items():
            ingest(engine, Document(name, name, text))
        yield engine
    model.profile = before


def test_an_answer_is_led_through_the_cell_and_cites_it(engine: Engine) -> None:
    for speculation in (True, False):
        answer = engine.answer("How many freshwater ducks were observed in 2022?", AskOptions(speculation=speculation))
        assert (answer.answer, answer.report.decoding.ended) == ("170", "stop")
        assert answer.citations[0].document_id == "ducks"
        assert answer.report.confidence is None
    engine.model.profile = replace(engine.model.profile, confidence=(0.0,) * 7)
    sure = engine.answer("How many freshwater ducks were observed in 2022?", AskOptions(abstain_below=0.9))
    assert (sure.answer, sure.report.confidence, sure.report.abstained) == ("170", None, False)
    told = engine.answer("Who is the chief of Lume?", AskOptions(conversation="a"))
    assert (told.answer, engine.catalog.turns("default", "a")[-1].answer) == ("Timo Karr", "Timo Karr")


def test_models_that_do_more_than_quote_and_other_requests_are_not_led(engine: Engine) -> None:
    question = "Who is the chief of Lume?"
    assert cell_guide(engine.model, engine.prefill(question)) is not None
    for options in (AskOptions(beginning="Timo"), AskOptions(instructions="Be brief."), AskOptions(max_tokens=1)):
        assert cell_guide(engine.model, engine.prefill(question, options)) is None
    engine.model.profile = replace(engine.model.profile, extractive=False)
    assert engine.prefill(question).sequence.guide is None
