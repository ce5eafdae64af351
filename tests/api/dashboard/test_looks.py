"""The page is readable in both colour modes and all sizes, and accessible; text of users stays text."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.api.dashboard.conftest import QUESTIONS, Desk

TABS = ("Overview", "Ask", "Documents")
# Contrast ratio of two colours by WCAG 2. Small text needs 4.5.
CONTRAST = """element => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  let under = element;
  while (under && (parse(getComputedStyle(under).backgroundColor)[3] ?? 1) === 0) under = under.parentElement;
  const a = light(parse(getComputedStyle(element).color));
  const b = light(parse(getComputedStyle(under || document.body).backgroundColor));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
PAYLOAD = (
    "<script>window.hit = 1</script> <img src=x onerror='window.hit = 2'> ![leak](http://203.0.113.1/leak.png)"
    " [click](javascript:window.hit=3) {{ constructor.constructor('window.hit = 4')() }}"
    " </textarea><svg onload=window.hit=5>"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_text_has_enough_contrast_in_both_colour_modes(desk: Desk, scheme: str) -> None:
    with desk.page(color_scheme=scheme) as page:
        dark = page.evaluate("document.body.classList.contains('body--dark')")
        assert dark == (scheme == "dark"), "the page follows the system"
        texts = page.locator(".tile .name, .tile .value, .tile .note, .link, .status, .title")
        assert min(texts.evaluate_all(f"found => found.map({CONTRAST})")) >= 4.5
        page.get_by_role("button", name="Light or dark").click()
        page.get_by_role("button", name="Light or dark").click()
        expect(page.locator("body")).to_have_class(re.compile("body--dark"))


def test_the_page_fits_a_small_phone(desk: Desk) -> None:
    with desk.page(viewport={"width": 360, "height": 740}) as page:
        for name in TABS:
            page.get_by_role("tab", name=name).click()
            if name == "Ask":
                page.get_by_label("Question").fill(QUESTIONS[0])
                page.get_by_role("button", name="Ask", exact=True).click()
                expect(page.get_by_role("grid")).to_be_visible(timeout=20_000)
                desk.answers.append(newest(desk))
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


def newest(desk: Desk) -> object:
    """Return the newest answer."""
    id = desk.client.get("/v1/answers?limit=1").json()["answers"][0]["id"]
    return desk.client.get(f"/v1/answers/{id}").json()


@pytest.mark.parametrize("name", TABS)
def test_every_control_has_a_name(desk: Desk, name: str) -> None:
    with desk.page(name) as page:
        nameless = [
            found.evaluate("e => e.outerHTML.slice(0, 200)")
            for role in ("button", "textbox", "combobox", "tab", "slider", "checkbox")
            for found in page.get_by_role(role).all()  # type: ignore[arg-type]
            if not named(found.aria_snapshot())
        ]
        assert nameless == []
        assert page.get_by_role("heading", level=1).inner_text() == "ragkv"
        assert page.get_by_role("tablist").count() == 1
        assert page.locator("html").get_attribute("lang")


def named(snapshot: str) -> bool:
    return re.match(r'- \w+ "[^"]+', snapshot) is not None


def test_markup_in_documents_questions_and_names_is_shown_as_text(desk: Desk) -> None:
    document = {
        "id": f"evil/{PAYLOAD[:40]}",
        "title": PAYLOAD,
        "text": f"Who is Mallory? {PAYLOAD}",
        "collection": "evil",
    }
    sent = desk.client.post("/v1/documents?wait=true", json={"documents": [document]})
    assert sent.json()["status"] == "completed", sent.text
    question = f"Who is Mallory? {PAYLOAD}"
    desk.ask(question, collection="evil")
    with desk.page() as page:
        page.get_by_role("button", name="Who is Mallory?").first.click()
        expect(page.get_by_role("dialog").get_by_role("grid")).to_be_visible()
        assert PAYLOAD in page.get_by_role("dialog").inner_text(), "it is shown as it was written"
        harmless(page)
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Ask").click()
        page.get_by_role("region", name="Ask").get_by_label("Collection").fill("evil")
        page.get_by_label("Question").fill(question)
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.get_by_role("grid").last).to_be_visible(timeout=20_000)
        desk.answers.append(newest(desk))
        harmless(page)
        page.get_by_role("tab", name="Documents").click()
        page.get_by_role("region", name="Add documents").get_by_label("Collection").fill("evil")
        expect(page.get_by_role("region", name="Documents", exact=True)).to_contain_text("onerror")
        harmless(page)


def harmless(page: Page) -> None:
    """Assert that no markup was executed or became an element of the page."""
    assert page.evaluate("window.hit") is None
    assert page.locator("img[src='x'], img[src*='203.0.113'], a[href^='javascript'], svg[onload]").count() == 0
