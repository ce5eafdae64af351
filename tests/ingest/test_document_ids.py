"""Two files are two documents, one file is one, and documents of an earlier release are neither lost nor doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.ingest.document_ids import DocumentIds, longer_names
from ragkv.ingest.pipeline import ingest
from ragkv.ingest.sources import load_locations
from ragkv.types import Document
from tests.ingest.reader import FileEngine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FileEngine]:
    opened = FileEngine(tmp_path / "data")
    yield opened
    opened.close()


@pytest.fixture
def years(tmp_path: Path) -> Path:
    """Folders of two years with files of the same names."""
    for year in ("2025", "2026"):
        (tmp_path / year / "contracts").mkdir(parents=True)
        (tmp_path / year / "contracts" / "report.md").write_text(f"The crane of {year} is blue.")
    return tmp_path


def run(
    engine: FileEngine, monkeypatch: pytest.MonkeyPatch, where: Path, *given: str | Path, stored: bool = True
) -> list[tuple[str, str]]:
    """Ingest paths from a working folder, as an earlier release did if not `stored`. Returns status and id of each."""
    monkeypatch.chdir(where)
    done = list[tuple[str, str]]()
    ids = DocumentIds(engine.catalog if stored else None)
    for item in load_locations(list(map(str, given)), 10_000, ids=ids):
        if isinstance(item, Document):
            document = item if stored else Document(item.id, item.title, item.text, item.metadata)
            done.append((ingest(engine, document).status, item.id))
        else:
            done.append(("rejected", str(item.error)))
    return done


def test_the_same_path_below_another_folder_is_another_document(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(engine, monkeypatch, years / "2025", "contracts") == [("added", "contracts/report.md")]
    assert run(engine, monkeypatch, years / "2026", "contracts") == [("added", "2026/contracts/report.md")]
    for year in ("2025", "2026"):
        assert [status for status, _ in run(engine, monkeypatch, years / year, "contracts")] == ["unchanged"]
    texts = {info.id: engine.catalog.original("default", info.id).text for info in engine.catalog.documents()}
    assert texts == {
        "contracts/report.md": "The crane of 2025 is blue.",
        "2026/contracts/report.md": "The crane of 2026 is blue.",
    }


def test_folders_of_the_same_name_in_one_ingest_are_told_apart(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (years / "here").mkdir()
    folders = [years / year / "contracts" for year in ("2025", "2026")]
    done = [("added", "contracts/report.md"), ("added", "2026/contracts/report.md")]
    assert run(engine, monkeypatch, years / "here", *folders) == done
    assert {status for status, _ in run(engine, monkeypatch, years / "here", *reversed(folders))} == {"unchanged"}


def test_a_file_is_one_document_from_any_folder_and_by_any_path(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = years / "2025" / "contracts" / "report.md"
    (years / "link").symlink_to("2025")
    assert run(engine, monkeypatch, years, "2025") == [("added", "2025/contracts/report.md")]
    for where, given in ((years / "2025", "contracts"), (years / "2026", file), (file.parent, "report.md")):
        assert run(engine, monkeypatch, where, given) == [("unchanged", "2025/contracts/report.md")]
    assert run(engine, monkeypatch, years, "link/contracts") == [("unchanged", "2025/contracts/report.md")]
    file.write_text("The crane is green.")
    assert run(engine, monkeypatch, file.parent, ".") == [("replaced", "2025/contracts/report.md")]


def test_a_file_that_is_given_twice_is_rejected_once(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run(engine, monkeypatch, years, "2025", "2025/contracts/report.md")
    assert (first, second[0]) == (("added", "2025/contracts/report.md"), "rejected")


def test_an_unchanged_folder_of_an_earlier_release_stays_unchanged_from_anywhere(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [("added", "contracts/report.md")]
    assert run(engine, monkeypatch, years / "2025", "contracts", stored=False) == old
    kept = [("unchanged", "contracts/report.md")]
    assert run(engine, monkeypatch, years, "2025") == kept
    assert run(engine, monkeypatch, years / "2025", "contracts") == kept
    assert run(engine, monkeypatch, years / "2026", "contracts") == [("added", "2026/contracts/report.md")]


def test_a_document_of_an_earlier_release_is_found_behind_what_nobody_sees(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (years / "2025" / "contracts" / "report.md").write_text("The ware\xadhouse is blue.")
    stored = Document("contracts/report.md", "report", "The ware\xadhouse is blue.", {"format": "markdown"})
    ingest(engine, stored)
    assert run(engine, monkeypatch, years, "2025") == [("replaced", "contracts/report.md")]
    assert [info.id for info in engine.catalog.documents()] == ["contracts/report.md"]


def test_a_changed_file_replaces_its_document_of_an_earlier_release(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, monkeypatch, years / "2025", "contracts", stored=False)
    (years / "2025" / "contracts" / "report.md").write_text("The crane is green.")
    assert run(engine, monkeypatch, years / "2025", "contracts") == [("replaced", "contracts/report.md")]


def test_a_folder_that_was_moved_keeps_its_documents(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, monkeypatch, years / "2025", "contracts")
    (years / "2025").rename(years / "archive")
    assert run(engine, monkeypatch, years, "archive") == [("unchanged", "contracts/report.md")]
    (years / "2025" / "contracts").mkdir(parents=True)
    (years / "2025" / "contracts" / "report.md").write_text("Another crane.")
    assert run(engine, monkeypatch, years / "2025", "contracts") == [("added", "2025/contracts/report.md")]


def test_a_sent_document_and_a_line_have_the_ids_that_they_name(
    engine: FileEngine, years: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for year in ("2025", "2026"):
        (years / year / "lines.jsonl").write_text(f'{{"id": "one", "text": "The line of {year}."}}')
    assert run(engine, monkeypatch, years / "2025", "lines.jsonl") == [("added", "one")]
    assert run(engine, monkeypatch, years / "2026", "lines.jsonl") == [("replaced", "one")]


def test_names_grow_to_the_whole_path() -> None:
    assert list(longer_names("c/r.md", "/a/b/c/r.md")) == ["b/c/r.md", "a/b/c/r.md"]
    ids = DocumentIds()
    ids.reserve("c/r.md", "c/r.md", "/x/c/r.md")
    ids.reserve("b/c/r.md", "b/c/r.md", "/x/b/c/r.md")
    assert ids.id_of("c/r.md", "/a/b/c/r.md") == "a/b/c/r.md"
    assert ids.id_of("c/r.md", "/x/c/r.md") == "c/r.md"
