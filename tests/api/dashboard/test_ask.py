"""The Ask tab: the answer is streamed, and the map of its blocks is shown."""

from __future__ import annotations

from collections import Counter
from typing import Any

from playwright.sync_api import Page, expect

from tests.api.dashboard.conftest import QUESTIONS, Desk

LETTERS = {"k": "kept", "r": "recomputed", "p": "pulled in later", "d": "dropped"}


def ask(page: Page, question: str, method: str = "") -> None:
    """Fill in the form and send it."""
    if method:
        page.get_by_role("combobox", name="Method").click()
        page.get_by_role("option", name=method, exact=True).click()
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()


def newest_map(desk: Desk) -> Any:
    """Return the map of the newest answer from the API."""
    newest = desk.client.get("/v1/answers?limit=1").json()["answers"][0]["id"]
    desk.answers.append(desk.client.get(f"/v1/answers/{newest}").json())
    return desk.client.get(f"/v1/answers/{newest}/map").json()


def test_the_map_shows_every_block_of_the_api(desk: Desk) -> None:
    with desk.page("Ask") as page:
        ask(page, QUESTIONS[0])
        answer = page.get_by_role("region", name="Answer")
        expect(answer.locator(".answer")).to_have_text("Ada Brook", timeout=20_000)
        expect(answer.get_by_role("grid")).to_be_visible(timeout=20_000)
        answer_map = newest_map(desk)
        assert answer.get_by_role("rowheader").count() == len(answer_map["chunks"]) == 2
        for layer in (-1, 0, answer_map["layers"] - 1):
            answer.get_by_label("Layer", exact=True).fill(str(layer))
            states = "".join(s for chunk in answer_map["chunks"] for s in chunk["states"][layer if layer >= 0 else 0])
            kinds = Counter(
                cell.split(" ")[1] for cell in answer.locator("td").evaluate_all("e => e.map(c => c.className)")
            )
            assert kinds == Counter(states), "scout chooses the same blocks in every layer"
        found = answer.locator("td.found").count()
        assert found == sum(len(chunk["holds_answer"]) for chunk in answer_map["chunks"]) > 0


def test_the_map_can_be_walked_with_the_arrow_keys(desk: Desk) -> None:
    with desk.page("Ask") as page:
        ask(page, QUESTIONS[0])
        grid = page.get_by_role("grid")
        expect(grid).to_be_visible(timeout=20_000)
        answer_map = newest_map(desk)
        grid.locator("td").first.focus()
        page.keyboard.press("ArrowDown")
        focused = page.locator("td:focus")
        expect(focused).to_have_attribute(
            "aria-label", f"[2] block 1 of {len(answer_map['chunks'][1]['states'][0])}: recomputed"
        )
        assert page.locator("figure pre").inner_text().strip() == answer_map["chunks"][1]["texts"][0].strip()
        page.keyboard.press("End")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowUp")
        expect(page.locator("figure figcaption")).to_contain_text("[1] block 1 of")
        assert grid.locator("td[tabindex='0']").count() == 1, "one stop for the tab key"


def test_the_answer_is_shown_while_it_is_decoded(desk: Desk) -> None:
    with desk.page("Ask") as page:
        page.evaluate(
            """() => {
              window.seen = [];
              const shown = () => document.querySelector("section[aria-label=Answer] .answer")?.innerText;
              const every = { subtree: true, childList: true, characterData: true };
              new MutationObserver(() => window.seen.push(shown())).observe(document.body, every);
            }"""
        )
        ask(page, QUESTIONS[1])
        expect(page.get_by_role("grid")).to_be_visible(timeout=20_000)
        whole = newest_answer(desk)
        parts = set(page.evaluate("window.seen")) - {None, "", whole}
        assert parts, "pieces came before the whole"
        assert all(whole.startswith(part) for part in parts)


def newest_answer(desk: Desk) -> str:
    """Return the newest answer."""
    newest_map(desk)
    answer: str = desk.answers[-1]["answer"]
    return answer


def test_another_method_gives_another_map(desk: Desk) -> None:
    with desk.page("Ask") as page:
        ask(page, QUESTIONS[0], "full")
        expect(page.get_by_role("grid")).to_be_visible(timeout=20_000)
        answer_map = newest_map(desk)
        assert {letter for chunk in answer_map["chunks"] for layer in chunk["states"] for letter in layer} == {"r"}
        assert page.locator("td.r").count() == page.locator("td").count()


def test_an_error_is_shown_as_text(desk: Desk) -> None:
    with desk.page("Ask") as page:
        page.get_by_role("region", name="Ask").get_by_label("Collection").fill("nowhere")
        ask(page, QUESTIONS[0])
        expect(page.get_by_role("region", name="Answer").get_by_role("alert")).to_contain_text("has no documents")


def test_another_tenant_sees_nothing_of_it(desk: Desk) -> None:
    assert desk.client.get("/v1/answers").json()["answers"], "acme has asked"
    with desk.page() as page:
        expect(page.get_by_role("button", name=QUESTIONS[0]).first).to_be_visible()
