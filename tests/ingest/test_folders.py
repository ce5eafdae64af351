"""Folders: what is not read of them is told, and a file has one name and one source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragkv.ingest.folders import FolderFault, named, skipped, source_of
from ragkv.ingest.loader import Rejected, load
from ragkv.ingest.sources import load_locations
from ragkv.types import Document


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.md").write_text("one")
    (folder / "deep" / "b.md").write_text("two")
    return folder


def faults_of(folder: Path) -> tuple[list[str], list[FolderFault]]:
    """Names of the files, and what is not read."""
    faults = list[FolderFault]()
    return [name for _, name in named([folder], folder.parent, faults.append)], faults


def test_a_folder_that_cannot_be_read_is_told(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    names, (fault,) = faults_of(notes)
    assert names == ["notes/a.md"]
    assert (fault.path, fault.hides) == (notes / "deep", True)
    items = list(load_locations([str(notes)], 1000))
    assert [type(item) for item in items] == [Document, Rejected]
    assert "deep: the folder cannot be read: Permission denied" in str(items[1].error)  # type: ignore[union-attr]
    assert [type(item) for item in load([notes], 1000)] == [Document, Rejected]


def test_a_linked_folder_is_told_and_not_walked(notes: Path) -> None:
    (notes / "again").symlink_to(notes)  # it leads into itself
    (notes / ".hidden").symlink_to(notes)
    names, (fault,) = faults_of(notes)
    assert names == ["notes/a.md", "notes/deep/b.md"]
    assert (fault.path, fault.hides) == (notes / "again", False)
    assert "linked folder is not read" in str(fault)
    assert faults_of(notes / "again")[0] == ["again/a.md", "again/deep/b.md"], "one that is named is walked"


def test_links_that_lead_nowhere_and_what_is_no_file_are_told(notes: Path) -> None:
    (notes / "lost.md").symlink_to("nowhere")
    (notes / "lost.png").symlink_to("nowhere")
    os.mkfifo(notes / "pipe.txt")
    names, faults = faults_of(notes)
    assert names == ["notes/a.md", "notes/deep/b.md"]
    assert [str(fault).rpartition("/")[2] for fault in faults] == [
        "lost.md: the link leads nowhere",
        "pipe.txt: it is no regular file",
    ]
    assert not list(skipped([notes]))


def test_a_linked_file_is_read_as_a_file_of_its_own(notes: Path) -> None:
    (notes / "c.md").symlink_to("a.md")
    assert faults_of(notes) == (["notes/a.md", "notes/c.md", "notes/deep/b.md"], [])
    assert source_of(notes / "c.md") != source_of(notes / "a.md")


def test_the_source_of_a_file_does_not_depend_on_how_its_path_is_written(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (notes.parent / "link").symlink_to(notes)
    monkeypatch.chdir(notes)
    manners = (Path("a.md"), Path("deep/../a.md"), notes / "a.md", notes.parent / "link" / "a.md")
    assert {source_of(path) for path in manners} == {f"{notes.resolve()}/a.md"}
