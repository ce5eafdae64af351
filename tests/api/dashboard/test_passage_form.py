"""Passages are shown in the form in which they came: Markdown drawn, preformatted text in a fixed face."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from ragkv.api.dashboard.passage_form import DRAWN, FIXED, PROSE, drawn, form_of
from tests.api.dashboard.conftest import Desk
from tests.api.dashboard.test_ask import ask, choose_option

TABLE = "Tide   Spring   Neap\nHigh   7.1 m    5.2 m\nLow    0.4 m    1.9 m"
ELEMENTS = frozenset("p h1 h2 h3 h4 h5 h6 ul ol li blockquote em strong hr pre code br mark s".split())


def mark(words: str) -> list[Any]:
    """Return marked words as an element."""
    return ["mark", {}, [words]]


@pytest.mark.parametrize(
    ("id", "metadata", "text", "form"),
    [
        ("notes.md", {}, "Plain words.", DRAWN),
        ("page", {"format": "html"}, "# Title", DRAWN),
        ("tides.txt", {}, TABLE, FIXED),
        ("main.txt", {}, "def f():\n    return 1\n\ndef g():\n    return 2", FIXED),
        ("prose.txt", {}, "The harbour was built.  Ada Brook built it.\nNobody else.\nIt rained.\nIt stopped.", PROSE),
        ("scan.pdf", {"format": "pdf"}, "One line of prose.\nAnother one.", PROSE),
        ("odd.md", {}, "has \ue000 inside", PROSE),
    ],
)
def test_the_form_is_that_of_the_document(id: str, metadata: dict[str, Any], text: str, form: str) -> None:
    assert form_of(id, metadata, text) == form


def test_markdown_becomes_elements_with_the_marks_inside() -> None:
    parts = [("# Tarn\n\n- built by **", False), ("Ada Brook", True), ("** in `1889`\n\n3. x\n\n```\na  b\n```", False)]
    assert drawn(parts) == [
        ["h1", {}, ["Tarn"]],
        [
            "ul",
            {},
            [["li", {}, ["built by ", ["strong", {}, [["mark", {}, ["Ada Brook"]]]], " in ", ["code", {}, ["1889"]]]]],
        ],
        ["ol", {"start": 3}, [["li", {}, ["x"]]]],
        ["pre", {}, [["code", {}, ["a  b"]]]],
    ]


def test_a_mark_that_begins_a_line_leaves_the_line_what_it_is() -> None:
    assert drawn([("- The mill burnt down.", True)]) == [
        ["ul", {}, [["li", {}, [["mark", {}, ["The mill burnt down."]]]]]]
    ]
    assert drawn([("## ", False), ("Mill", True)]) == [["h2", {}, [["mark", {}, ["Mill"]]]]]


def test_a_mark_goes_on_from_element_to_element() -> None:
    assert drawn([("a ", False), ("b **c**\n\nd", True), (" e", False)]) == [
        ["p", {}, ["a ", ["mark", {}, ["b "]], ["strong", {}, [["mark", {}, ["c"]]]]]],
        ["p", {}, [["mark", {}, ["d"]], " e"]],
    ]


def test_links_pictures_and_markup_leave_their_words_alone() -> None:
    shown = drawn([("[go](http://203.0.113.1) ![pic](x.png) <img src=x> <http://203.0.113.2>", False)])
    assert shown == [["p", {}, ["go", " ", "pic", " <img src=x> ", "http://203.0.113.2"]]]


@given(st.lists(st.tuples(st.text("ab #-*_>\n1.", max_size=12), st.booleans()), max_size=6))
def test_any_text_is_drawn_with_known_elements_and_loses_no_word(parts: list[tuple[str, bool]]) -> None:
    def texts(nodes: list[Any]) -> str:
        return "".join(each if isinstance(each, str) else texts(each[2]) + " " for each in nodes)

    def tags(nodes: list[Any]) -> set[str]:
        return {tag for each in nodes if not isinstance(each, str) for tag in {each[0], *tags(each[2])}}

    nodes = drawn(parts)
    assert tags(nodes) <= ELEMENTS
    assert re.sub("[^ab]", "", texts(nodes)) == re.sub("[^ab]", "", "".join(part for part, _ in parts))


def test_a_passage_of_markdown_is_drawn_and_a_table_of_text_stands_in_a_fixed_face(desk: Desk) -> None:
    table = "| part | built by |\n|---|---|\n| sluice of Tarn | Ida Falk |"
    markdown = f"# Sluice\n\n{table}\n\nThe sluice of Tarn was built by Ida Falk."
    documents = [
        {"id": "sluice.md", "title": "Sluice", "text": markdown, "collection": "forms"},
        {"id": "tides.txt", "title": "Tides", "text": TABLE, "collection": "forms"},
    ]
    assert desk.client.post("/v1/documents?wait=true", json={"documents": documents}).json()["status"] == "completed"
    with desk.page("Ask") as page:
        choose_option(page, "Collection", "forms (2)")
        answer = ask(page, "Who built the sluice of Tarn?")
        cited = desk.newest()["citations"]
        if answer.get_by_role("button", name="All 2 passages").count():
            answer.get_by_role("button", name="All 2 passages").click()
        answer.locator(".source").filter(has_text="Sluice").click()
        text = answer.locator(".passage blockquote.drawn")
        expect(text.locator("h1")).to_have_text("Sluice")
        expect(text.locator("td").first).to_have_text("sluice of Tarn")
        if any(each["marks"] for each in cited):
            expect(text.locator("mark").first).to_be_visible()
        assert "|" not in text.inner_text()
        answer.locator(".source").filter(has_text="Tides").click()
        fixed = answer.locator(".passage blockquote.monospaced")
        expect(fixed).to_be_visible()
        assert fixed.inner_text() == TABLE
        inside, around = fixed.bounding_box(), answer.locator(".passage").bounding_box()
        assert inside is not None
        assert around is not None
        assert around["y"] < inside["y"] < inside["y"] + inside["height"] < around["y"] + around["height"]
        assert "mono" in fixed.evaluate("each => getComputedStyle(each).fontFamily").lower()
        choose_option(page, "Collection", "default (2)")
