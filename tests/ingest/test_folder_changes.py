"""Watched folders: what changed is found once it is settled, and an unmounted disk removes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.ingest.folder_changes import FolderChanges, FolderScanner


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("one")
    (folder / "b.txt").write_text("two")
    return folder


def watching(folder: Path) -> tuple[FolderScanner, Callable[[], FolderChanges]]:
    """A watch that has accepted what is there, and what scans until a change would be settled."""
    watch = FolderScanner([folder], folder.parent)
    watch.scan()
    watch.accept(watch.scan())

    def settled() -> FolderChanges:
        watch.scan()
        return watch.scan()

    return watch, settled


def test_files_count_once_two_scans_have_seen_them_and_until_they_are_accepted(notes: Path) -> None:
    watch = FolderScanner([notes], notes.parent)
    assert not watch.scan()
    changes = watch.scan()
    assert changes.changed == {"notes/a.md": notes / "a.md", "notes/b.txt": notes / "b.txt"}
    assert watch.scan() == changes, "nobody has accepted it"
    watch.accept(changes)
    assert not watch.scan()


def test_new_changed_and_removed_files_are_changes(notes: Path) -> None:
    watch, settled = watching(notes)
    (notes / "deep").mkdir()
    (notes / "deep" / "c.md").write_text("three")
    (notes / "a.md").write_text("changed")
    (notes / "b.txt").unlink()
    (notes / "picture.png").write_text("no format")
    (notes / ".hidden.md").write_text("hidden")
    changes = settled()
    assert (set(changes.changed), changes.removed) == (
        {"notes/a.md", "notes/deep/c.md"},
        {"notes/b.txt": notes / "b.txt"},
    )
    watch.accept(changes)
    assert not settled()


def test_a_file_that_is_being_written_waits(notes: Path) -> None:
    watch, _ = watching(notes)
    for size in range(1, 4):
        (notes / "grows.md").write_text("x" * size)
        assert not watch.scan()
    assert set(watch.scan().changed) == {"notes/grows.md"}


def test_a_change_during_the_ingest_is_found_afterwards(notes: Path) -> None:
    watch, settled = watching(notes)
    (notes / "a.md").write_text("second")
    changes = settled()
    (notes / "a.md").write_text("third version")
    watch.accept(changes)
    assert set(settled().changed) == {"notes/a.md"}


def test_a_file_that_is_replaced_by_another_of_the_same_size_and_time_is_a_change(notes: Path) -> None:
    watch, settled = watching(notes)
    facts = (notes / "a.md").stat()
    (notes / "new").write_text("eno")
    os.utime(notes / "new", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (notes / "new").rename(notes / "a.md")
    assert set(settled().changed) == {"notes/a.md"}
    assert watch.scan()


def test_a_file_that_is_gone_for_one_scan_is_not_removed(notes: Path) -> None:
    watch, _ = watching(notes)
    (notes / "a.md").rename(notes / "moved")
    assert not watch.scan()
    (notes / "moved").rename(notes / "a.md")
    assert not watch.scan()


def test_a_folder_that_is_gone_or_not_mounted_removes_nothing(notes: Path) -> None:
    watch, settled = watching(notes)
    notes.rename(notes.with_name("elsewhere"))
    assert not settled()
    notes.mkdir()  # where the disk would be mounted
    assert not settled()
    notes.rmdir()
    notes.with_name("elsewhere").rename(notes)
    assert not settled()
    (notes / "a.md").unlink()
    (notes / "b.txt").unlink()
    assert set(settled().removed) == {"notes/a.md", "notes/b.txt"}, "the folder itself is there and empty"
    assert watch.scan()


def test_a_folder_that_cannot_be_listed_removes_nothing(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (notes / "deep").mkdir()
    (notes / "deep" / "c.md").write_text("three")
    _, settled = watching(notes)
    (notes / "b.txt").unlink()
    real = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "no", str(path))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    changes = settled()
    assert not changes.removed
    assert [(fault.path.name, fault.hides) for fault in changes.faults] == [("deep", True)]
    monkeypatch.undo()
    assert set(settled().removed) == {"notes/b.txt"}


def test_what_was_there_before_the_watch_began_is_removed_if_its_file_is_gone(notes: Path) -> None:
    watch = FolderScanner([notes], notes.parent)
    watch.assume([("notes/a.md", notes / "a.md"), ("notes/gone.md", Path())])
    watch.scan()
    changes = watch.scan()
    assert (set(changes.changed), changes.removed) == ({"notes/a.md", "notes/b.txt"}, {"notes/gone.md": Path()})
    empty = notes.with_name("empty")
    empty.mkdir()
    other = FolderScanner([empty], notes.parent)
    other.assume([("empty/a.md", empty / "a.md")])
    other.scan()
    assert not other.scan(), "it may be a disk that is not mounted yet"


def test_a_linked_folder_is_told_and_keeps_nothing_from_being_removed(notes: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (notes / "link").symlink_to(tmp_path / "far")
    _, settled = watching(notes)
    (notes / "b.txt").unlink()
    changes = settled()
    assert set(changes.removed) == {"notes/b.txt"}
    assert [fault.path.name for fault in changes.faults] == ["link"]
