"""Examples of questions are those that the service answers from the documents, and go with their documents."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from playwright.sync_api import expect

from ragkv.api.dashboard.examples import READ, ExampleFinder, convincing, passages_of
from ragkv.catalog import CollectionInfo
from ragkv.engine.service_rules import rule_report
from ragkv.evaluation.questions import plain_questions
from ragkv.passages import Citation, Mark
from ragkv.report import Answer
from ragkv.timing import StepTimer
from tests.api.dashboard.conftest import HARBOUR, Desk, read_metrics
from tests.api.dashboard.test_ask import choose_option

REPORT = replace(rule_report("service", "tiny", StepTimer()), rule="")
HELD = Citation("d", "d#0", "Tarn", 0.5, text="Ada Brook", start=0, marks=(Mark(0, 9, 0, 9),))


@pytest.mark.parametrize(
    ("answer", "confidence", "cited", "offered"),
    [
        ("Ada Brook", None, HELD, True),
        ("Ada Brook", 0.9, HELD, True),
        ("Brook", 0.9, HELD, True),
        ("Ada Brook", 0.6, HELD, False),
        ("Otto Lindqvist", 0.9, HELD, False),
        ("unknown", 0.9, HELD, False),
        ("Ada Brook", 0.9, replace(HELD, marks=()), False),
    ],
)
def test_an_answer_convinces_if_it_is_the_expected_one_and_sure_and_held(
    answer: str, confidence: float | None, cited: Citation, offered: bool
) -> None:
    report = replace(REPORT, confidence=confidence)
    assert convincing(Answer("Who?", answer, (cited,), report), "Ada Brook") is offered


def test_simple_questions_begin_as_users_ask_and_each_passage_has_its_turn() -> None:
    passages = [
        (HARBOUR["title"], HARBOUR["text"]),
        ("Mell", "The bridge of Mell was built in 1931 by Otto Lindqvist."),
    ]
    made = plain_questions(passages, 16)
    assert made == plain_questions(passages, 16)
    assert {question.split()[0] for question, _ in made} <= {"Who", "When", "Where", "Why", "How", "What"}
    assert ["Tarn" in question for question, _ in made[:2]] == [True, False]


class LongDocument:
    """A catalogue with one document, of a word that never ends."""

    def page(self, *asked: Any) -> list[Any]:
        return [SimpleNamespace(id="d", title="T")]

    def chunk_page(self, *asked: Any) -> tuple[None, list[Any]]:
        return None, [SimpleNamespace(text="aA" * READ)]


def test_rules_read_the_beginning_of_a_passage_alone() -> None:
    """Their expressions are quadratic in a word's length, and hold the interpreter meanwhile."""
    ((_, text),) = passages_of(cast("Any", LongDocument()), "default")
    assert len(text) == READ


class BusyThread:
    """An engine thread that has something to do, as far as an ExampleFinder sees it."""

    def __init__(self, **health: int):
        self._health = {"waiting": 0, "running": 0, "documents_waiting": 0, **health}
        self.catalog_service = self

    def health(self) -> dict[str, int]:
        return self._health

    def examples(self, collection: str) -> list[Any]:
        return []


@pytest.mark.parametrize("busy", ["waiting", "running", "documents_waiting", "jobs_running"])
def test_no_example_is_tried_while_somebody_asks_or_a_document_is_ingested(busy: str) -> None:
    async def searches() -> bool:
        finder = ExampleFinder(cast("Any", BusyThread(**{busy: 1})))
        assert await finder.questions(CollectionInfo("default", 3, 3, 90)) == []
        return finder.searching("default")

    with ThreadPoolExecutor(1) as thread:  # Playwright keeps a loop running in this one
        assert not thread.submit(lambda: asyncio.run(searches())).result()


def test_examples_are_answered_with_the_expected_words_and_not_counted(desk: Desk) -> None:
    before = read_metrics(desk.client)
    with desk.page("Ask") as page:
        examples = page.locator(".examples").get_by_role("button")
        expect(examples.first).to_be_visible(timeout=20_000)
        asked = examples.all_inner_texts()
        assert not any("say?" in question for question in asked)
        after = read_metrics(desk.client)
        assert {k: v for k, v in after.items() if "answers_total" in k[0]} == {
            k: v for k, v in before.items() if "answers_total" in k[0]
        }
        for question in asked:
            answer = desk.ask(question)
            assert any(each["marks"] for each in answer["citations"]), question


def test_examples_leave_with_their_document(desk: Desk) -> None:
    document = {
        "id": "kiln",
        "title": "Kiln",
        "text": "The kiln of Orsk was built in 1822 by Ina Falk.",
        "collection": "k",
    }
    rest = {"id": "sea", "title": "Sea", "text": "Water, wide and grey.", "collection": "k"}
    assert (
        desk.client.post("/v1/documents?wait=true", json={"documents": [document, rest]}).json()["status"]
        == "completed"
    )
    with desk.page("Ask") as page:
        choose_option(page, "Collection", "k (2)")
        examples = page.locator(".examples").get_by_role("button").filter(has_text="kiln of Orsk")
        expect(examples.first).to_be_visible(timeout=20_000)
        assert desk.client.delete("/v1/documents/kiln?collection=k").status_code == 204
        expect(examples).to_have_count(0, timeout=10_000)
        choose_option(page, "Collection", "default (2)")
