"""The Documents tab: files are uploaded with their progress, and deleted."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.api.dashboard.conftest import HARBOUR, Desk


def test_files_are_uploaded_ingested_listed_and_deleted(desk: Desk, tmp_path: Path) -> None:
    good, bad = tmp_path / "mill.md", tmp_path / "bad.txt"
    good.write_text("# The mill\n\n" + "The mill of Oster grinds rye. " * 60)
    bad.write_bytes(b"\xff\xfe\x00")
    with desk.page("Documents") as page:
        page.get_by_role("region", name="Add documents").get_by_label("Collection").fill("mills")
        page.locator("input[type=file]").set_input_files([good, bad])
        job = page.get_by_role("region", name="Jobs")
        expect(job).to_contain_text("mills · 2 documents", timeout=10_000)
        expect(job.get_by_role("progressbar").first).to_have_attribute("aria-valuenow", "1", timeout=30_000)
        expect(job).to_contain_text("2 of 2 done")
        expect(job).to_contain_text("1 failed: bad.txt")
        listed = page.get_by_role("region", name="Documents", exact=True)
        expect(listed).to_contain_text("The mill")
        documents = desk.client.get("/v1/documents?collection=mills").json()["documents"]
        assert [each["id"] for each in documents] == ["mill.md"]
        listed.get_by_role("row", name="The mill").get_by_role("checkbox").click()
        listed.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(listed).not_to_contain_text("The mill")
        assert desk.client.get("/v1/documents?collection=mills").json()["documents"] == []


def test_a_refused_upload_shows_the_error_of_the_service(desk: Desk, tmp_path: Path) -> None:
    with desk.page("Documents", faults=1) as page:  # the browser notes the 422, too
        page.get_by_role("region", name="Add documents").get_by_label("Collection").fill("x" * 600)
        page.locator("input[type=file]").set_input_files([_file(tmp_path, "a.txt", "Some text.")])
        expect(page.get_by_role("region", name="Add documents").get_by_role("alert")).to_contain_text("collection")


def test_the_documents_of_a_collection_are_those_of_the_api(desk: Desk) -> None:
    with desk.page("Documents") as page:
        listed = page.get_by_role("region", name="Documents", exact=True)
        expect(listed.get_by_role("row", name=HARBOUR["title"])).to_contain_text("harbour")


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path
