"""The viewer shows the page of a PDF as a picture, with the passage marked, with the mouse and with the keyboard."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from ragkv.api.dashboard.formatting import size
from tests.api.dashboard.conftest import HARBOUR, Desk
from tests.api.dashboard.test_ask import ask, choose_option
from tests.api.dashboard.test_documents import choose_collection
from tests.api.dashboard.test_looks import CONTRAST, CUT_OFF
from tests.ingest.formats.files import pdf

NAME = "quay.pdf"
FILE = pdf("The plan of the quay.", "The quay of Lund was\npaved by Sten Berg.", info={"Title": "Quay"})
# How much of a picture has the colour of a mark on white.
YELLOW = """async (image) => {
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at] > 240 && data[at + 2] < 200;
  return count;
}"""


@pytest.fixture
def filled(desk: Desk) -> Desk:
    """The desk with a PDF in the collection `plans`."""
    sent = desk.client.post(
        "/v1/documents?wait=true", files=[("files", (NAME, FILE))], data={"collection": "plans"}
    ).json()
    assert sent["status"] == "completed", sent
    return desk


def opened(page: Page) -> Locator:
    """Open the viewer of the PDF, and its tab of pages."""
    choose_collection(page, "plans")
    page.get_by_role("button", name="Quay", exact=True).click()
    viewer = page.get_by_role("dialog")
    viewer.get_by_role("tab", name="Page").click()
    expect(viewer.get_by_role("status")).to_have_text("Page 1 of 2")
    return viewer


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark"), (390, "light"), (1280, "dark")])
def test_pages_are_shown_one_after_the_other(filled: Desk, width: int, scheme: Any) -> None:
    with filled.page("Documents", width=width, scheme=scheme) as page:
        viewer = opened(page)
        # The collection's sizes come with a request of their own, some time after the list of documents.
        expect(page.locator("body")).to_contain_text(f" · files {size(len(FILE))}")
        for tab in viewer.get_by_role("tab").all():
            expect(tab).to_be_in_viewport(ratio=1)
        picture = viewer.get_by_role("img", name="Page 1 of Quay")
        box = picture.bounding_box()
        assert box is not None
        assert 300 < box["width"] <= width
        assert picture.evaluate(YELLOW) == 0
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(CUT_OFF) == []
        expect(viewer.get_by_role("button", name="Previous page")).to_be_disabled()
        viewer.get_by_role("button", name="Next page").click()
        expect(viewer.get_by_role("status")).to_have_text("Page 2 of 2")
        expect(viewer.get_by_role("img", name="Page 2 of Quay")).to_be_visible()
        expect(viewer.get_by_role("button", name="Next page")).to_be_disabled()
        page.keyboard.press("Escape")
        choose_collection(page, "default")


def test_pages_are_reached_with_the_keyboard(filled: Desk) -> None:
    with filled.page("Documents") as page:
        choose_collection(page, "plans")
        page.get_by_role("button", name="Quay", exact=True).focus()
        page.keyboard.press("Enter")
        viewer = page.get_by_role("dialog")
        viewer.get_by_role("tab", name="Text").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(viewer.get_by_role("status")).to_have_text("Page 1 of 2")
        viewer.get_by_role("button", name="Next page").focus()
        page.keyboard.press("Enter")
        expect(viewer.get_by_role("status")).to_have_text("Page 2 of 2")
        page.keyboard.press("Escape")
        choose_collection(page, "default")


def test_a_cited_passage_is_marked_on_its_page(filled: Desk) -> None:
    with filled.page("Ask") as page:
        choose_option(page, "Collection", "plans (1)")
        answer = ask(page, "Who paved the quay of Lund?")
        filled.newest()
        answer.locator(".cite").first.click()
        answer.get_by_role("button", name="Open the document").click()
        viewer = page.get_by_role("dialog")
        viewer.get_by_role("tab", name="Page").click()
        expect(viewer.get_by_role("status")).to_contain_text("The passage is marked.")
        expect(viewer.get_by_role("status")).to_contain_text("Page 2 of 2")
        assert viewer.get_by_role("img", name="Page 2 of Quay").evaluate(YELLOW) > 1000
        page.keyboard.press("Escape")
        choose_option(page, "Collection", "default (2)")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_mark_low_on_a_page_is_scrolled_to(desk: Desk, width: int) -> None:
    tall = pdf("The lock of Ebbe was\nopened by Nora Dahl.", info={"Title": "Lock"}).replace(b"612 792", b"612 2400")
    sent = desk.client.post(
        "/v1/documents?wait=true", files=[("files", ("lock.pdf", tall))], data={"collection": "tall"}
    )
    assert sent.json()["status"] == "completed", sent.text
    with desk.page("Ask") as page:
        choose_option(page, "Collection", "tall (1)")
        answer = ask(page, "Who opened the lock of Ebbe?")
        desk.newest()
        page.set_viewport_size({"width": width, "height": 800})
        answer.locator(".cite").first.click()
        answer.get_by_role("button", name="Open the document").click()
        viewer = page.get_by_role("dialog")
        for name in ("Page", "Text", "Page"):
            viewer.get_by_role("tab", name=name).click()
        expect(viewer.get_by_role("status")).to_contain_text("The passage is marked.")
        expect(viewer.locator(".sheet div")).to_be_in_viewport(ratio=1)
        assert viewer.get_by_role("img", name="Page 1 of Lock").evaluate(YELLOW) > 1000
        page.keyboard.press("Escape")
        page.set_viewport_size({"width": 1280, "height": 800})
        choose_option(page, "Collection", "default (2)")


def test_a_document_that_is_no_pdf_has_no_pages(desk: Desk) -> None:
    with desk.page("Documents") as page:
        page.get_by_role("button", name=HARBOUR["title"], exact=True).click()
        viewer = page.get_by_role("dialog")
        expect(viewer.get_by_role("tab", name="Text")).to_be_visible()
        expect(viewer.get_by_role("tab", name="Page")).to_have_count(0)
        page.keyboard.press("Escape")
