"""The Documents tab: files are uploaded with their progress; documents are found, shown and deleted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from ragkv.api.dashboard.document_rows import common_tags, find_pending, folders_of
from ragkv.api.dashboard.documents import FORMAT_NAMES
from ragkv.api.dashboard.formatting import size
from ragkv.api.dashboard.jobs import work_of
from ragkv.catalog import DocumentInfo
from ragkv.ingest.folders import SUFFIXES
from ragkv.ingest.jobs import Counts, IngestJob, JobEntry, JobFault
from tests.api.dashboard.conftest import BRIDGE, HARBOUR, QUESTIONS, Desk
from tests.api.dashboard.test_ask import choose_option


def choose_collection(page: Page, name: str) -> None:
    """Type the name of a collection."""
    field = page.get_by_role("region", name="Add documents").get_by_role("combobox", name="Collection")
    field.fill(name)
    field.press("Enter")


def test_files_are_uploaded_ingested_listed_and_deleted(desk: Desk, tmp_path: Path) -> None:
    good, bad = tmp_path / "mill.md", tmp_path / "bad.txt"
    good.write_text("# The mill\n\n" + "The mill of Oster grinds rye. " * 60)
    bad.write_bytes(b"\xff\xfe\x00")
    with desk.page("Documents") as page:
        choose_collection(page, "mills")
        expect(page.get_by_text("Nothing is stored in this collection.")).to_be_visible()
        page.locator("input[type=file]").set_input_files([good, bad])
        files = page.get_by_role("list", name="Files").get_by_role("listitem")
        expect(files.filter(has_text="mill.md")).to_contain_text("done", timeout=30_000)
        expect(files.filter(has_text="mill.md").get_by_role("progressbar")).to_have_js_property("value", 1)
        expect(files.filter(has_text="bad.txt")).to_contain_text("save it as UTF-8")
        jobs = page.get_by_role("region", name="Jobs")
        expect(jobs.get_by_text("finished · 1 document failed")).to_be_visible()
        expect(jobs.get_by_text("mills · 2 documents")).to_be_hidden()
        jobs.locator("summary").click()
        expect(jobs.get_by_text("mills · 2 documents")).to_be_visible()
        jobs.locator("summary").click()
        listed = page.get_by_role("region", name="Documents", exact=True)
        expect(listed.get_by_role("row", name="The mill")).to_contain_text("ready")
        expect(listed.get_by_role("row", name="bad.txt")).to_contain_text("failed")
        expect(listed).to_contain_text("1 document ·")
        page.get_by_role("combobox", name="Status").click()
        page.get_by_role("option", name="failed").click()
        expect(listed.get_by_role("row", name="The mill")).to_have_count(0)
        page.get_by_role("combobox", name="Status").click()
        page.get_by_role("option", name="all").click()
        expect(listed.get_by_role("row", name="The mill")).to_be_visible()
        listed.get_by_role("checkbox", name="All on this page").check()
        listed.get_by_role("toolbar").get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(listed).to_contain_text("No documents yet.")
        assert desk.client.get("/v1/documents?collection=mills").json()["documents"] == []
        choose_collection(page, "default")
        expect(listed.get_by_role("row", name=BRIDGE["title"])).to_be_visible()


def test_a_refused_upload_shows_the_error_of_the_service(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Some text.")
    with desk.page("Documents", faults=1) as page:  # the browser notes the 422, too
        choose_collection(page, "x" * 600)
        expect(page.get_by_text("Nothing is stored in this collection.")).to_be_visible()  # the choice has arrived
        page.locator("input[type=file]").set_input_files([file])
        expect(page.get_by_role("list", name="Files").locator(".fault").first).to_contain_text("collection")
        choose_collection(page, "default")
        page.get_by_role("button", name="Clear the list").click()


def test_documents_are_searched_and_sorted(desk: Desk) -> None:
    with desk.page("Documents") as page:
        listed = page.get_by_role("region", name="Documents", exact=True)
        titles = listed.locator("tbody .of-title .link")
        expect(titles).to_have_text([BRIDGE["title"], HARBOUR["title"]])
        listed.get_by_role("columnheader", name="Document").get_by_role("button").click()
        expect(titles).to_have_text([HARBOUR["title"], BRIDGE["title"]])
        expect(listed.get_by_role("columnheader", name="Document")).to_have_attribute("aria-sort", "descending")
        listed.get_by_label("Search ids and titles").fill("HARB")
        expect(titles).to_have_text([HARBOUR["title"]])
        listed.get_by_label("Search ids and titles").fill("")
        expect(titles).to_have_count(2)


def test_the_viewer_shows_text_chunks_metadata_version_and_questions(desk: Desk) -> None:
    stored = desk.client.get("/v1/documents/harbour").json()
    with desk.page("Documents") as page:
        page.get_by_role("button", name=HARBOUR["title"], exact=True).click()
        viewer = page.get_by_role("dialog")
        expect(viewer.get_by_role("tabpanel").last).to_contain_text(HARBOUR["text"])
        for name, content in (
            ("Chunks", f"{stored['tokens']} tokens"),
            ("Metadata", "harbour"),
            ("Version", stored["hash"]),
        ):
            viewer.get_by_role("tab", name=name).click()
            expect(viewer.get_by_role("tabpanel").last).to_contain_text(content)
        viewer.get_by_role("tab", name="Questions").click()
        viewer.get_by_role("button", name=QUESTIONS[0]).first.click()
        expect(page.get_by_role("region", name="Answer").first.get_by_role("heading")).to_have_text(QUESTIONS[0])


def test_on_a_phone_the_viewer_has_its_tabs_and_close_in_one_line_each(desk: Desk) -> None:
    with desk.page("Documents", width=360) as page:
        page.get_by_role("button", name=HARBOUR["title"], exact=True).click()
        viewer = page.get_by_role("dialog")
        for each in (*viewer.get_by_role("tab").all(), viewer.get_by_role("button", name="Close")):
            expect(each).to_be_in_viewport(ratio=1)
        heading = viewer.get_by_role("heading").first
        expect(heading).to_have_text(HARBOUR["title"])  # it comes after the dialog
        title, close = heading.bounding_box(), viewer.get_by_role("button", name="Close").bounding_box()
        assert title is not None
        assert close is not None
        assert close["x"] >= title["x"] + title["width"]
        assert close["y"] < title["y"] + title["height"]
        expect(viewer.locator(".q-tabs__arrow--right")).to_be_hidden()
        page.keyboard.press("Escape")


def test_all_formats_that_can_be_read_are_named(desk: Desk) -> None:
    assert set(FORMAT_NAMES) == set(SUFFIXES)
    with desk.page("Documents") as page:
        drop = page.get_by_role("region", name="Add documents")
        for name in ("Text", "PowerPoint", "Excel", "EPUB", "e-mail", "TSV", "JSON lines"):
            expect(drop).to_contain_text(name)


def test_documents_are_found_by_folder_and_by_tag_and_ingested_again(desk: Desk) -> None:
    documents = [
        {"id": "tides/2024/spring.md", "title": "Spring", "text": "High water at six.", "metadata": {"kind": "tide"}},
        {"id": "tides/moon.md", "title": "Moon", "text": "The moon pulls.", "metadata": {"kind": "note", "year": 2024}},
        {"id": "log.md", "title": "Log", "text": "Nothing new.", "metadata": {"kind": "note"}},
    ]
    given = [{**each, "collection": "sea"} for each in documents]
    assert desk.client.post("/v1/documents?wait=true", json={"documents": given}).json()["status"] == "completed"
    with desk.page("Documents") as page:
        choose_collection(page, "sea")
        listed = page.get_by_role("region", name="Documents", exact=True)
        expect_titles(listed, ["Log", "Moon", "Spring"])
        tags = listed.locator("tbody tr").filter(has_text="Moon").locator(".tag")
        expect(tags).to_have_text(["kind: note", "year: 2024"])
        choose_option(page, "Folder", "tides/ (2)")
        expect_titles(listed, ["Moon", "Spring"])
        choose_option(page, "Folder", "tides/2024/ (1)")
        expect_titles(listed, ["Spring"])
        choose_option(page, "Folder", "all")
        choose_option(page, "Tag", "kind: note")
        expect_titles(listed, ["Log", "Moon"])
        choose_option(page, "Tag", "all")
        expect_titles(listed, ["Log", "Moon", "Spring"])
        before = desk.client.get("/v1/documents/log.md?collection=sea").json()
        listed.get_by_role("checkbox", name="Choose Log").check()
        listed.get_by_role("button", name="Ingest again").click()
        for _ in range(100):
            after = desk.client.get("/v1/documents/log.md?collection=sea").json()
            if after["updated"] > before["updated"]:
                break
            page.wait_for_timeout(100)
        assert after["updated"] > before["updated"]
        assert (after["version"], after["hash"], after["created"]) == (1, before["hash"], before["created"])
        choose_collection(page, "default")


def expect_titles(listed: Locator, titles: list[str]) -> None:
    """Wait until exactly these documents are listed, in any order."""
    links = listed.locator("tbody .of-title .link")
    expect(links).to_have_count(len(titles))
    for title in titles:
        expect(links.filter(has_text=title)).to_have_count(1)


def test_a_document_tells_its_kv_before_and_after_and_what_a_question_saves(desk: Desk) -> None:
    stored = desk.client.get("/v1/documents/harbour").json()
    with desk.page("Documents") as page:
        row = page.get_by_role("row", name=HARBOUR["title"])
        expect(row.locator(".of-kv")).to_have_text(f"{size(stored['kv_bytes'])} → {size(stored['stored_bytes'])}")
        assert re.fullmatch(r"≈ [\d.]+ (ms|s)", row.locator(".of-saves").inner_text())
        listed = page.get_by_role("region", name="Documents", exact=True)
        expect(listed).to_contain_text(re.compile(r"KV .+ as computed, ≈ .+ in the store"))
        row.get_by_role("button", name=HARBOUR["title"], exact=True).click()
        viewer = page.get_by_role("dialog")
        viewer.get_by_role("tab", name="Metadata").click()
        expect(viewer.get_by_role("tabpanel").last).to_contain_text("question over it saves")
        page.keyboard.press("Escape")


def test_folders_count_what_is_below_them_and_tags_are_single_values() -> None:
    infos = [info("a/b/one", {"kind": "x", "n": [1, 2], "deep": {"no": 1}}), info("a/two", {}), info("three", {})]
    assert folders_of(infos) == {"a/": 2, "a/b/": 1}
    assert common_tags(infos) == [("kind", "x"), ("n", 1), ("n", 2)]


def info(id: str, metadata: dict[str, object]) -> DocumentInfo:
    """Return a document with this id and metadata."""
    return DocumentInfo("c", id, id, metadata, "", "", 1, 1, 1.0, 1.0, 1, 1)


def test_only_the_newest_job_of_a_document_says_whether_it_is_pending() -> None:
    fault = JobFault("invalid_document", "it is empty")
    jobs = [
        job("3", JobEntry("a", "completed", None), JobEntry("c", "running", None)),
        job("2", JobEntry("a", "failed", fault), JobEntry("b", "failed", fault)),
        job("1", JobEntry("b", "completed", None)),
    ]
    found = find_pending(jobs, {job.id: job for job in jobs}.__getitem__)
    assert [(each.id, each.state, each.reason) for each in found] == [
        ("c", "waiting", ""),
        ("b", "failed", "it is empty"),
    ]


@pytest.mark.parametrize(
    ("stage", "done", "total", "told"),
    [
        ("encode", 12, 80, " · encoding chunk 13 of 80"),
        ("encode", 80, 80, " · encoding chunk 80 of 80"),
        ("embed", 0, 2, " · embedding chunk 1 of 2"),
        ("encode", 0, 1, ""),
        ("split", 30, 9000, ""),
        ("", 0, 0, ""),
    ],
)
def test_a_job_tells_how_far_a_long_document_is(stage: str, done: int, total: int, told: str) -> None:
    running = replace(job("1", JobEntry("a", "running", None)), stage=stage, done=done, total=total)
    assert work_of(running) == told
    assert work_of(replace(running, finished=2.0)) == ""


def job(id: str, *entries: JobEntry) -> IngestJob:
    """Return a job with these documents."""
    failed = sum(entry.status == "failed" for entry in entries)
    running = any(entry.status == "running" for entry in entries)
    counts = Counts(len(entries), len(entries) - running, len(entries) - failed - running, 0, failed, 0)
    status = "running" if running else "completed"
    finished = None if running else 2.0
    return IngestJob(id, "mills", status, "", 0, 0, counts, None, None, None, entries, 1.0, 1.0, 1.0, finished)
