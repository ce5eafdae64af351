"""The Ask tab: answers are streamed, cite their passages, and show the map of their blocks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.api.dashboard.browser import tab
from tests.api.dashboard.conftest import BRIDGE, QUESTIONS, Desk, log_in
from tests.api.dashboard.loaded import JUDGED

LETTERS = {"k": "kept", "r": "recomputed", "p": "pulled in later", "d": "dropped"}


def ask(page: Page, question: str, method: str = "") -> Locator:
    """Fill in the form and send it; return the answer once it is whole."""
    if method:
        choose_option(page, "Method", method)
    answers = page.get_by_role("region", name="Answer")
    before = answers.count()
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(answers).to_have_count(before + 1)  # else `last` is the answer before, perhaps to the same question
    answer = answers.last
    expect(answer.get_by_role("heading").first).to_have_text(question)
    expect(answer.get_by_text("Map of the KV blocks")).to_be_visible(timeout=20_000)
    return answer


def choose_option(page: Page, name: str, option: str) -> None:
    """Choose an option of a list of the form."""
    page.get_by_role("combobox", name=name).click()
    page.get_by_role("option", name=option, exact=True).click()


def open_map(desk: Desk, answer: Locator) -> Any:
    """Open the map of the newest answer; return it as the API gives it."""
    answer.get_by_text("Map of the KV blocks").click()
    expect(answer.get_by_role("grid")).to_be_visible()
    return desk.client.get(f"/v1/answers/{desk.newest()['id']}/map").json()


def test_an_empty_start_offers_examples_and_the_collections(desk: Desk) -> None:
    with desk.page("Ask") as page:
        expect(page.get_by_role("heading", name="Ask your documents")).to_be_visible()
        page.get_by_role("combobox", name="Collection").click()
        expect(page.get_by_role("option", name="default (2)")).to_be_visible()
        page.keyboard.press("Escape")
        example = page.locator(".examples").get_by_role("button").first
        expect(example).to_be_visible(timeout=20_000)
        question = example.inner_text()
        example.click()
        expect(page.get_by_role("region", name="Answer").get_by_role("heading")).to_have_text(question)
        expect(page.get_by_text("Map of the KV blocks")).to_be_visible(timeout=20_000)
        expect(page.get_by_role("heading", name="Ask your documents")).to_be_hidden()
        desk.newest()


def test_a_number_opens_the_passage_with_the_answers_words_marked(desk: Desk) -> None:
    with desk.page("Ask") as page:
        answer = ask(page, QUESTIONS[1])
        expect(answer.locator(".answer")).to_contain_text("Otto Lindqvist")
        citations = desk.newest()["citations"]
        (number,) = [n for n, cited in enumerate(citations, start=1) if cited["marks"]]
        button = answer.get_by_role("button", name=f"Passage {number}")
        button.focus()
        page.keyboard.press("Enter")
        passage = answer.get_by_role("region", name=f"Passage {number}")
        expect(passage.locator("mark")).to_have_text("Otto Lindqvist")
        assert citations[number - 1]["text"].startswith("## Bridges")
        expect(passage.locator("blockquote h2")).to_have_text("Bridges")
        expect(passage.locator("blockquote p")).to_have_text(citations[number - 1]["text"].partition("\n\n")[2])
        expect(passage.locator("header")).to_contain_text("Mell")
        expect(passage.locator("header")).to_contain_text("Bridges · chunk 1")
        expect(answer.get_by_role("list", name="Passages").locator(".source b")).to_have_count(1)
        answer.get_by_role("button", name=f"All {len(citations)} passages").click()
        expect(answer.get_by_role("list", name="Passages").locator(".source b")).to_have_count(len(citations))
        passage.get_by_role("button", name="Open the document").click()
        viewer = page.get_by_role("dialog")
        expect(viewer.get_by_role("heading", name=BRIDGE["title"])).to_be_visible()
        viewer.get_by_role("button", name="Close").click()
        expect(viewer).to_be_hidden()


def test_the_map_opens_at_the_answer_and_shows_every_block_of_the_api(desk: Desk) -> None:
    with desk.page("Ask") as page:
        answer = ask(page, QUESTIONS[0])
        answer_map = open_map(desk, answer)
        expect(answer.get_by_text("blocks chosen by meaning, words, links, attention")).to_be_visible()
        chunks = answer_map["chunks"]
        heads = answer.get_by_role("rowheader")
        assert heads.count() == len(chunks) == 2
        assert {line for head in heads.all() for line in head.inner_text().split("\n")} >= {
            "Bridges · chunk 1",
            "chunk 1",
        }
        row = next(n for n, chunk in enumerate(chunks) if chunk["holds_answer"])
        block = chunks[row]["holds_answer"][0]
        expect(answer.locator("figcaption")).to_contain_text(f"block {block + 1} of {len(chunks[row]['texts'])}")
        assert answer.locator("figure pre").text_content() == "".join(chunks[row]["texts"]), "the whole passage"
        assert answer.locator("figure mark").text_content() == chunks[row]["texts"][block]
        for layer in (-1, 0, answer_map["layers"] - 1):
            answer.get_by_label("Layer", exact=True).fill(str(layer))
            states = "".join(s for chunk in chunks for s in chunk["states"][layer if layer >= 0 else 0])
            kinds = Counter(
                cell.split(" ")[1]
                for cell in answer.get_by_role("gridcell").evaluate_all("e => e.map(c => c.className)")
            )
            assert kinds == Counter(states), "scout chooses the same blocks in every layer"
        found = answer.locator(".cell.found").count()
        assert found == sum(len(chunk["holds_answer"]) for chunk in chunks) > 0
        walk(page, answer, chunks)


def walk(page: Page, answer: Locator, chunks: Any) -> None:
    """Walk the map with the arrow keys."""
    grid = answer.get_by_role("grid")
    grid.get_by_role("gridcell").first.focus()
    page.keyboard.press("ArrowDown")
    kind = LETTERS[chunks[1]["states"][0][0]]
    said = f"[2] block 1 of {len(chunks[1]['states'][0])}: {kind}"
    expect(page.locator(".cell:focus")).to_have_attribute("aria-label", said)
    assert answer.locator("figure mark").text_content() == chunks[1]["texts"][0]
    for key in ("End", "Home", "ArrowUp"):
        page.keyboard.press(key)
    expect(answer.locator("figcaption")).to_contain_text("[1] block 1 of")
    assert grid.locator("[tabindex='0']").count() == 1, "one stop for the tab key"


def test_the_answer_is_shown_while_it_is_decoded(desk: Desk) -> None:
    with desk.page("Ask") as page:
        page.evaluate(
            """() => {
              window.seen = [];
              const shown = () => document.querySelector(".thread .answer")?.innerText;
              const every = { subtree: true, childList: true, characterData: true };
              new MutationObserver(() => window.seen.push(shown())).observe(document.body, every);
            }"""
        )
        ask(page, QUESTIONS[1])
        whole = desk.newest()["answer"]
        parts = {part for part in page.evaluate("window.seen") if part and whole.startswith(part)} - {whole}
        assert parts, "pieces came before the whole"


def test_the_newest_answer_is_not_hidden_behind_the_composer(desk: Desk) -> None:
    with desk.page("Ask") as page:
        for question in (*QUESTIONS[:2], *QUESTIONS[:2]):
            answer = ask(page, question)
            desk.newest()
        for width, height in ((1280, 800), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            answer = ask(page, QUESTIONS[0])
            desk.newest()
            composer = page.locator(".composer").bounding_box()
            assert composer is not None
            page.wait_for_function(
                "end => document.querySelector('.thread > :last-child').getBoundingClientRect().bottom <= end",
                arg=composer["y"],
                timeout=3000,
            )
            expect(answer.get_by_role("heading").first).to_be_in_viewport()


@pytest.mark.parametrize(("width", "height"), [(1280, 700), (390, 700)])
def test_an_opened_passage_is_not_hidden_behind_the_composer(desk: Desk, width: int, height: int) -> None:
    with desk.page("Ask", width=width) as page:
        page.set_viewport_size({"width": width, "height": height})
        for question in (QUESTIONS[1], QUESTIONS[0], QUESTIONS[1]):
            answer = ask(page, question)
            desk.newest()
        page.evaluate("document.querySelector('.thread > :last-child').scrollIntoView({block: 'end'})")
        answer.locator(".cite").first.click()
        passage, composer = answer.locator(".passage").bounding_box(), page.locator(".composer").bounding_box()
        assert passage is not None
        assert composer is not None
        assert 47 <= passage["y"] <= passage["y"] + passage["height"] <= composer["y"]


def test_on_a_phone_the_choices_are_folded_and_opened_with_the_keyboard(desk: Desk) -> None:
    with desk.page("Ask", width=390) as page:
        composer = page.locator(".composer")
        box = composer.bounding_box()
        assert box is not None
        assert box["height"] < 80
        expect(page.get_by_role("combobox", name="Method")).to_be_hidden()
        expect(composer.get_by_role("button", name="Ask", exact=True)).to_be_in_viewport()
        page.get_by_label("Question").focus()
        page.keyboard.press("Tab")
        unfold = page.get_by_role("button", name="Choices")
        expect(unfold).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("combobox", name="Method")).to_be_in_viewport()
        expect(unfold).to_have_attribute("aria-expanded", "true")
        question = page.get_by_label("Question").bounding_box()
        assert question is not None
        assert question["width"] > 240, "the choices leave it its line"
        page.keyboard.press("Enter")
        expect(page.get_by_role("combobox", name="Method")).to_be_hidden()
        expect(unfold).to_have_attribute("aria-expanded", "false")


def test_the_document_of_a_passage_opens_at_the_words_of_the_answer(desk: Desk) -> None:
    text = "The sea is wide. " * 300 + "The mill of Rosk was founded by Ina Falk in 1702. " + "The sea is wide. " * 300
    document = {"id": "mill", "title": "Rosk", "text": text, "collection": "rosk"}
    sent = desk.client.post("/v1/documents?wait=true", json={"documents": [document]})
    assert sent.json()["status"] == "completed", sent.text
    with desk.page("Ask") as page:
        choose_option(page, "Collection", "rosk (1)")
        answer = ask(page, "Who founded the mill of Rosk?")
        cited = next(each for each in desk.newest()["citations"] if each["marks"])
        mark = cited["marks"][0]
        answer.locator(".cite").first.click()
        answer.get_by_role("button", name="Open the document").click()
        marked = page.get_by_role("dialog").locator(".text mark")
        expect(marked).to_have_text(text[mark["start"] : mark["end"]])
        expect(marked).to_be_in_viewport()
        page.keyboard.press("Escape")
        choose_option(page, "Collection", "default (2)")


def test_another_method_gives_another_map(desk: Desk) -> None:
    with desk.page("Ask") as page:
        answer = ask(page, QUESTIONS[0], "full")
        answer_map = open_map(desk, answer)
        assert {letter for chunk in answer_map["chunks"] for layer in chunk["states"] for letter in layer} == {"r"}
        assert answer.locator(".cell.r").count() == answer.get_by_role("gridcell").count()
        choose_option(page, "Method", "as set (default)")


def test_a_long_question_ends_with_an_ellipsis_in_the_history(desk: Desk) -> None:
    with desk.page("Ask") as page:
        ask(page, "Which of the harbours that are described in these documents is the oldest one by its year?")
        desk.newest()
        title = page.get_by_role("complementary", name="History").locator("[aria-current=true] b")
        assert title.evaluate("each => each.scrollWidth > each.clientWidth"), "its text is longer than its box"
        inside = "each => each.getBoundingClientRect().right <= each.closest('aside').getBoundingClientRect().right"
        assert title.evaluate(inside), "the end of its box, where the ellipsis stands, is visible"


def test_a_remembered_conversation_is_continued_and_found_in_the_history(desk: Desk) -> None:
    with desk.page("Ask") as page:
        page.get_by_role("switch", name="Remember").click()
        ask(page, QUESTIONS[0])
        assert desk.newest()["report"]["tokens"]["history"] == 0
        ask(page, QUESTIONS[1])
        assert desk.newest()["report"]["tokens"]["history"] > 0, "the model reads the turn before"
        history = page.get_by_role("complementary", name="History")
        expect(history.locator("[aria-current=true]")).to_contain_text(QUESTIONS[1])
        page.get_by_role("button", name="New conversation").click()
        expect(page.get_by_role("region", name="Answer")).to_have_count(0)
        history.get_by_role("button", name=QUESTIONS[1]).first.click()
        answers = page.get_by_role("region", name="Answer")
        expect(answers).to_have_count(2)
        expect(answers.first.get_by_role("heading")).to_have_text(QUESTIONS[0])
        expect(answers.last.locator(".answer")).to_contain_text(desk.answers[-1]["answer"])
        expect(history.locator("[aria-current=true]")).to_have_count(1)
        page.get_by_role("switch", name="Remember").click()


def test_a_remembered_conversation_is_deleted_with_its_answers_once_the_user_agrees(desk: Desk) -> None:
    with desk.page("Ask") as page:
        delete = page.get_by_role("button", name="Delete conversation")
        expect(delete).to_be_hidden()
        page.get_by_role("switch", name="Remember").click()
        ask(page, QUESTIONS[0])
        gone = desk.newest()["id"]
        delete.click()
        page.get_by_role("button", name="Keep").click()
        expect(page.get_by_role("region", name="Answer")).to_have_count(1)
        delete.click()
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(page.get_by_role("region", name="Answer")).to_have_count(0)
        expect(delete).to_be_hidden()
        assert desk.client.get(f"/v1/answers/{gone}").status_code == 404
        page.get_by_role("switch", name="Remember").click()


def test_an_error_is_shown_as_text(desk: Desk) -> None:
    with desk.page("Ask") as page:
        page.get_by_label("Question").fill("harbour " * 3000)
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.get_by_role("region", name="Answer").get_by_role("alert")).to_contain_text("2048", timeout=20_000)


def test_a_question_beyond_the_limit_of_its_tenant_is_refused(desk: Desk) -> None:
    with tab(desk.browser, f"{desk.url}/dashboard") as (page, _):
        log_in(page, desk.other_key)
        alerts = page.get_by_role("alert")
        for asked in range(3):  # a minute may end in between, and another test may have asked in it
            page.get_by_label("Question").fill("Who?")
            page.get_by_role("button", name="Ask", exact=True).click()
            expect(alerts).to_have_count(asked + 1)
        assert any("are used up" in said for said in alerts.all_inner_texts())


def test_a_yes_shows_the_sentence_that_decides_before_what_was_searched(desk: Desk) -> None:
    with tab(desk.browser, f"{desk.url}/dashboard") as (page, _):
        log_in(page, desk.other_key)
        history = page.get_by_role("complementary", name="History")
        history.get_by_role("button", name="API").click()
        history.locator(".entry").filter(has_text=JUDGED).click()
        answer = page.get_by_role("region", name="Answer")
        expect(answer.locator(".answer")).to_contain_text("yes")
        expect(answer.get_by_text("Searched 1 passage of 1 document.")).to_be_visible()
        deciding, listed = answer.locator(".deciding"), answer.get_by_role("list", name="Passages")
        expect(deciding).to_contain_text("This sentence decides:")
        expect(deciding.locator("blockquote")).to_have_text("The mill of Orm was burnt down in 1901.")
        above, below = deciding.bounding_box(), listed.bounding_box()
        assert above is not None
        assert below is not None
        assert above["y"] < below["y"]


def test_an_unknown_shows_the_passages_that_were_searched(desk: Desk) -> None:
    with desk.page("Ask") as page:
        answer = ask(page, "What is the price of bananas in Lima?")
        recorded = desk.newest()
        expect(answer.get_by_text("Searched 2 passages of 2 documents.")).to_be_visible()
        expect(answer.locator(".source b")).to_have_count(2)
        if recorded["answer"] == "unknown":
            answer.locator(".source").first.click()
            expect(answer.locator(".passage blockquote")).not_to_be_empty()


def test_an_answer_is_copied_with_the_places_of_its_passages(desk: Desk) -> None:
    with desk.page("Ask") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        answer = ask(page, QUESTIONS[1])
        answer.get_by_role("button", name="Copy").click()
        expect(answer.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith(desk.newest()["answer"])
        assert "Mell, Bridges · chunk 1" in copied


def test_a_rating_is_kept_with_the_answer_and_taken_back(desk: Desk) -> None:
    with desk.page("Ask") as page:
        answer = ask(page, QUESTIONS[0])
        id = desk.newest()["id"]
        good, bad = (answer.get_by_role("button", name=name) for name in ("Good answer", "Bad answer"))
        for button, rating in ((good, "up"), (bad, "down"), (bad, "")):
            button.click()
            expect(button).to_have_attribute("aria-pressed", "true" if rating else "false")
            assert desk.client.get(f"/v1/answers/{id}").json()["rating"] == rating
        good.click()
        history = page.get_by_role("complementary", name="History")
        expect(history.locator("li").first.get_by_label("Good answer")).to_be_visible()


def test_a_question_is_asked_again_with_full(desk: Desk) -> None:
    with desk.page("Ask") as page:
        answer = ask(page, QUESTIONS[0])
        desk.newest()
        answer.get_by_role("button", name="Ask again with full").click()
        answers = page.get_by_role("region", name="Answer")
        expect(answers).to_have_count(2)
        expect(answers.last.get_by_text("Map of the KV blocks")).to_be_visible(timeout=20_000)
        expect(answers.last.get_by_role("button", name="Ask again with full")).to_have_count(0)
        assert desk.newest()["report"]["method"] == "full"


@pytest.mark.parametrize("kind", ["Markdown", "JSON"])
def test_a_conversation_is_exported_with_its_ratings(desk: Desk, kind: str) -> None:
    with desk.page("Ask") as page:
        for question in QUESTIONS[:2]:
            answer = ask(page, question)
            desk.newest()
        answer.get_by_role("button", name="Bad answer").click()
        expect(answer.get_by_role("button", name="Bad answer")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="Export").click()
        with page.expect_download() as download:
            page.get_by_text(kind, exact=True).click()
        text = download.value.path().read_text("utf-8")
        if kind == "JSON":
            answers = json.loads(text)
            assert [each["question"] for each in answers] == list(QUESTIONS[:2])
            assert [each["rating"] for each in answers] == ["", "down"]
            assert answers[1]["citations"]
        else:
            assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {q}" for q in QUESTIONS[:2]]
            assert "rated bad" in text
            assert "1\\. Mell" in text or "1. Mell" in text or "2. Mell" in text


def test_the_history_is_searched_and_lists_page_and_api_apart(desk: Desk) -> None:
    with desk.page("Ask") as page:
        ask(page, QUESTIONS[0])
        desk.newest()
        desk.ask("When was the bridge of Mell painted green at dusk?")
        history = page.get_by_role("complementary", name="History")
        entries = history.locator(".entry")
        expect(entries.filter(has_text="at dusk")).to_have_count(0)
        history.get_by_role("button", name="API").click()
        expect(entries.filter(has_text="at dusk").first).to_be_visible()
        history.get_by_label("Search the history").fill("DUSK mell")
        expect(entries.filter(has_text="harbour")).to_have_count(0)
        expect(entries.first).to_contain_text("at dusk")
        history.get_by_role("button", name="Page", exact=True).click()
        expect(history).to_contain_text("No question or answer has these words.")
        history.get_by_label("Search the history").fill("")
        expect(entries.first).to_contain_text(QUESTIONS[0])


def test_an_entry_of_the_history_is_deleted_once_the_user_agrees(desk: Desk) -> None:
    with desk.page("Ask") as page:
        ask(page, QUESTIONS[2])
        gone = desk.newest()["id"]
        history = page.get_by_role("complementary", name="History")
        drop = history.get_by_role("button", name=f"Delete from the history: {QUESTIONS[2]}").first
        drop.click()
        page.get_by_role("button", name="Keep").click()
        assert desk.client.get(f"/v1/answers/{gone}").status_code == 200
        drop.click()
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(page.get_by_role("region", name="Answer")).to_have_count(0)
        assert desk.client.get(f"/v1/answers/{gone}").status_code == 404


@pytest.mark.parametrize(("width", "height"), [(1280, 700), (390, 700)])
def test_the_question_box_covers_nothing(desk: Desk, width: int, height: int) -> None:
    with desk.page("Ask", width=width) as page:
        page.set_viewport_size({"width": width, "height": height})
        for question in QUESTIONS:
            ask(page, question)
            desk.newest()
        for end in ("0", "1e9", "200"):
            page.locator(".thread").evaluate(f"each => each.scrollTop = {end}")
            thread, composer = page.locator(".thread").bounding_box(), page.locator(".composer").bounding_box()
            assert thread is not None
            assert composer is not None
            assert thread["y"] + thread["height"] <= composer["y"]
            assert composer["y"] + composer["height"] <= height
            assert page.locator(".thread").evaluate("each => each.scrollHeight > each.clientHeight")
