"""Questions about the service are answered by rules; questions about documents are not, whatever words they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.engine.service_rules import rule_of
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.types import AskOptions, Document
from tests.start_records import with_records


@pytest.mark.parametrize(
    ("question", "rule"),
    [
        ("hello", "greeting"),
        ("Hi there!", "greeting"),
        ("Hi, how are you?", "greeting"),
        ("Good morning.", "greeting"),
        ("Thank you very much!", "greeting"),
        ("你好", "greeting"),
        ("Hi 👋", "greeting"),
        ("Many thanks :)", "greeting"),
        ("What kind of questions can I ask?", "service"),
        ("What questions can you answer?", "service"),
        ("Are you a bot?", "service"),
        ("I need a summary of the report.", "summary"),
        ("Summary, please", "summary"),
        ("What is in this collection?", "list"),
        ("Which files can I ask about?", "list"),
        ("What can I ask you?", "service"),
        ("what can you do", "service"),
        ("Who are you?", "service"),
        ("What does this service do?", "service"),
        ("help", "service"),
        ("Summarise the report about the harbour.", "summary"),
        ("Could you please summarize this?", "summary"),
        ("Give me a short summary of the minutes", "summary"),
        ("TL;DR of the report", "summary"),
        ("List the documents", "list"),
        ("Please list all documents.", "list"),
        ("Which documents do you have?", "list"),
        ("How many files are there?", "list"),
        ("Show me the titles of all documents", "list"),
    ],
)
def test_what_is_asked_of_the_service_has_a_rule(question: str, rule: str) -> None:
    assert rule_of(question, extractive=True) == rule


@pytest.mark.parametrize(
    "question",
    [
        "List the pumps of harbour Tarn",
        "List the documents that a sailor needs.",
        "Which documents does a sailor need?",
        "How many files does the archive of Tarn hold?",
        "Who built the harbour of Tarn?",
        "Who said hello to the mayor?",
        "Hello, who built the harbour?",
        "What can I ask the harbour master?",
        "What is the service of Tarn?",
        "What is this?",
        "Who are you calling?",
        "What does the summary of the report say?",
        "Name the mayor.",
        "Thanks to whom was the bridge built?",
        "Help for whom?",
        "What is the summary rate of the tax?",
        "Are you a bot farm owner?",
        "",
    ],
)
def test_a_question_about_the_documents_has_none(question: str) -> None:
    assert rule_of(question, extractive=True) == ""


def test_a_model_that_does_more_than_quote_is_asked_to_summarise_and_to_list() -> None:
    assert rule_of("Summarise the report", extractive=False) == rule_of("List the documents", extractive=False) == ""
    assert rule_of("hello", extractive=False) == "greeting"


@pytest.fixture
def engine(model: DecoderModel, tmp_path: Path) -> Iterator[Engine]:
    before = model.profile
    with Engine.open(Settings(data=with_records(tmp_path), device="cpu")) as engine:
        yield engine
    model.profile = before


def put(engine: Engine, *titles: str, collection: str = "default") -> None:
    for title in titles:
        ingest(engine, Document(title, title, f"The harbour of {title} is old.", {"town": title}, collection))


def test_an_answer_by_rule_names_the_documents_of_its_collection_and_reads_nothing(engine: Engine) -> None:
    put(engine, "Tarn", "Orrin")
    put(engine, "Secret", collection="other")
    engine.model.forward = lambda passes: pytest.fail("the model was asked")  # type: ignore[method-assign, assignment]
    answer = engine.answer("hello")
    assert "2 documents: “Orrin”, “Tarn”." in answer.answer
    assert "Secret" not in answer.answer
    assert (answer.citations, answer.report.rule, answer.report.chunks) == ((), "greeting", ())
    assert "do not summarise" in engine.answer("Summarise the harbour of Tarn").answer
    filtered = engine.answer("list the documents", AskOptions(filter={"town": "Tarn"}))
    assert filtered.answer == "There is 1 document: “Tarn”."


def test_an_answer_by_rule_needs_no_documents_and_joins_no_conversation(engine: Engine) -> None:
    answer = engine.answer("What can I ask you?", AskOptions(conversation="a"))
    assert (answer.report.rule, "There are no documents yet." in answer.answer) == ("service", True)
    assert engine.catalog.turns("default", "a") == []


def test_a_list_names_twenty_titles_and_how_many_more(engine: Engine) -> None:
    put(engine, *(f"Town {number:02}" for number in range(23)))
    listed = engine.answer("List the documents").answer
    assert listed.count("“Town") == 20
    assert listed.startswith("There are 23 documents: ")
    assert listed.endswith(" and 3 more.")
    assert engine.answer("hi").answer.count("“Town") == 3


def test_a_profile_says_that_the_model_quotes(engine: Engine) -> None:
    put(engine, "Tarn")
    assert engine.model.profile.extractive
    engine.model.profile = replace(engine.model.profile, extractive=False)
    assert engine.answer("Summarise the harbour of Tarn").report.rule == ""
