"""The page is readable in both colour modes and all sizes, and accessible; text of users stays text."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.api.dashboard.conftest import QUESTIONS, Desk
from tests.api.dashboard.test_ask import ask, choose_option
from tests.api.dashboard.test_documents import choose_collection

TABS = ("Ask", "Documents", "Overview")
VIEWER = ("Text", "Chunks", "Metadata", "Version", "Questions")
# The elements with visible text whose contrast ratio by WCAG 2 is below 4.5, which small text needs. Disabled controls
# and icons are left out, as are marks on the coloured cells of the map, whose name tells the same.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const opaque = (element) => (parse(getComputedStyle(element).backgroundColor)[3] ?? 1) > 0;
  const ratio = (element) => {
    let under = element;
    while (under && !opaque(under)) under = under.parentElement;
    const style = getComputedStyle(element);
    const a = light(parse(element.tagName === "text" ? style.fill : style.color));
    const b = light(parse(getComputedStyle(under || document.body).backgroundColor));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const shows = (element) => element.checkVisibility({ checkVisibilityCSS: true })
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = [...document.querySelectorAll("body *")].filter((element) =>
    shows(element) && !element.closest(".cell, .q-icon, [disabled], script, style, .swatch"));
  const found = texts.map((element) => [ratio(element), element.outerHTML.slice(0, 120)]);
  return found.filter(([ratio]) => ratio < 4.5).map(([ratio, text]) => ratio.toFixed(1) + " " + text);
}"""
# The visible elements that reach beyond the page, and those whose text is cut off without an ellipsis. What scrolls
# inside an element is left out, and so is the bar that slides in while a page loads.
CUT_OFF = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (element) =>
    element && (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
  const all = [...document.querySelectorAll("body *")].filter((element) =>
    element.checkVisibility({ checkVisibilityCSS: true }) && !element.closest(".q-loading-bar"));
  const out = all.filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width && (box.right > width + 1 || box.left < -1) && !scrolls(element.parentElement);
  });
  const cut = all.filter((element) => {
    const style = getComputedStyle(element);
    return element.innerText && element.clientWidth > 1 && element.scrollWidth > element.clientWidth + 1
      && ["hidden", "clip"].includes(style.overflowX) && style.textOverflow !== "ellipsis";
  });
  return [...out, ...cut].map((element) => element.outerHTML.slice(0, 120));
}"""
PAYLOAD = (
    "<script>window.hit = 1</script> <img src=x onerror='window.hit = 2'> ![leak](http://203.0.113.1/leak.png)"
    " [click](javascript:window.hit=3) {{ constructor.constructor('window.hit = 4')() }}"
    " </textarea><svg onload=window.hit=5>"
)

# The line of a control without a name in a snapshot of the accessibility tree.
NAMELESS = re.compile(r'\s*- (button|textbox|combobox|tab|slider|checkbox|switch|searchbox)\b(?! ")')


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_colour_modes(desk: Desk, scheme: str) -> None:
    with desk.page("Ask", scheme=scheme) as page:
        expect(page.locator("body")).to_have_class(re.compile("body--dark" if scheme == "dark" else "body--light"))
        ask(page, QUESTIONS[0])
        desk.newest()
        page.get_by_role("button", name="Passage 1").first.click()
        page.get_by_text("Map of the KV blocks").click()
        expect(page.get_by_role("grid")).to_be_visible()
        for name in TABS:
            page.get_by_role("tab", name=name).click()
            assert faint(page) == [], name
        page.get_by_role("button", name=QUESTIONS[0]).first.click()  # of the latest answers, in a dialog
        expect(page.get_by_role("dialog").get_by_role("grid")).to_be_visible()
        assert faint(page) == []
        page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_star_on_a_dropped_block_has_the_colour_of_text(desk: Desk, scheme: str) -> None:
    with desk.page("Ask", scheme=scheme) as page:
        ask(page, QUESTIONS[0])
        desk.newest()
        page.get_by_text("Map of the KV blocks").click()
        star = page.locator(".cell.found").first
        star.evaluate("star => { star.className = 'cell found d' }")
        assert len({each.evaluate("each => getComputedStyle(each).color") for each in (star, page.locator("pre"))}) == 1


def faint(page: Page) -> list[str]:
    """Return the visible texts with too little contrast."""
    found: list[str] = page.evaluate(CONTRAST)
    return found


def test_a_button_switches_the_colour_mode(desk: Desk) -> None:
    with desk.page("Ask") as page:
        button = page.get_by_role("button", name="Light or dark")
        button.click()
        button.click()
        expect(page.locator("body")).to_have_class(re.compile("body--dark"))
        button.click()
        expect(page.locator("body")).to_have_class(re.compile("body--light"))


def test_the_page_fits_a_small_phone(desk: Desk) -> None:
    with desk.page("Ask", width=360) as page:
        ask(page, QUESTIONS[0])
        desk.newest()
        page.get_by_role("button", name="Passage 1").first.click()
        page.get_by_text("Map of the KV blocks").click()
        expect(page.get_by_role("grid")).to_be_visible()
        for name in TABS:
            page.get_by_role("tab", name=name).click()
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_clipped_or_sticks_out(desk: Desk, width: int) -> None:
    with desk.page("Ask", width=width) as page:
        ask(page, QUESTIONS[0])
        desk.newest()
        page.get_by_role("button", name="Passage 1").first.click()
        page.get_by_text("Map of the KV blocks").click()
        expect(page.get_by_role("grid")).to_be_visible()
        for name in TABS:
            page.get_by_role("tab", name=name).click()
            expect(page.locator(".q-tab-panel")).to_have_count(1)
            assert page.evaluate(CUT_OFF) == [], name


def test_on_a_phone_the_open_history_has_the_whole_width(desk: Desk) -> None:
    with desk.page("Ask", width=390) as page:
        history = page.locator(".history")
        was_open = history.get_attribute("open") is not None
        if not was_open:
            history.locator("summary").click()
        listed, new = history.bounding_box(), page.get_by_role("button", name="New conversation").bounding_box()
        assert listed is not None
        assert new is not None
        assert listed["width"] > 340
        assert listed["y"] + listed["height"] <= new["y"], "the button is below, and covers nothing"
        if not was_open:
            history.locator("summary").click()


@pytest.mark.parametrize("name", TABS)
def test_every_control_has_a_name(desk: Desk, name: str) -> None:
    with desk.page(name) as page:
        # One picture of the whole page: its parts are drawn anew while it is open, so what was counted may be gone.
        tree = page.locator("body").aria_snapshot()
        assert all(f'- tab "{tab}"' in tree for tab in TABS)
        assert [line for line in tree.splitlines() if NAMELESS.match(line)] == []
        assert page.get_by_role("heading", level=1).inner_text() == "ragkv"
        assert page.get_by_role("tablist").count() == 1
        assert page.locator("html").get_attribute("lang")


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
    with desk.page("Overview") as page:
        page.get_by_role("button", name="Who is Mallory?").first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("grid")).to_be_visible()
        dialog.get_by_role("button", name="Passage 1").or_(dialog.locator(".source")).first.click()
        assert PAYLOAD in dialog.inner_text(), "it is shown as it was written"
        harmless(page)
        page.keyboard.press("Escape")
    with desk.page("Ask") as page:
        choose_option(page, "Collection", "evil (1)")
        ask(page, question)
        desk.newest()
        harmless(page)
        choose_option(page, "Collection", "default (2)")
    with desk.page("Documents") as page:
        choose_collection(page, "evil")
        listed = page.get_by_role("region", name="Documents", exact=True)
        expect(listed).to_contain_text("onerror")
        listed.locator("tbody .link").click()
        for name in VIEWER:
            page.get_by_role("dialog").get_by_role("tab", name=name).click()
            harmless(page)
        page.keyboard.press("Escape")
        choose_collection(page, "default")


def harmless(page: Page) -> None:
    """Assert that no markup was executed or became an element of the page."""
    assert page.evaluate("window.hit") is None
    assert page.locator("img[src='x'], img[src*='203.0.113'], a[href^='javascript'], svg[onload]").count() == 0
