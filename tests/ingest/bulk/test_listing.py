"""What a bulk ingest reads: shares, ids that occur twice, and the estimate of the number of documents."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from ragkv.ingest.bulk import listing
from ragkv.ingest.bulk.listing import SHARE_FILES, SourceListing, list_files


def listed(*places: Path) -> SourceListing:
    with ExitStack() as stack:
        return list_files([str(place) for place in places], stack)


def test_files_are_listed_in_shares_that_hold_each_once(tmp_path: Path) -> None:
    for number in range(SHARE_FILES + 6):
        (tmp_path / f"{number:03}.txt").write_text("A line.")
    found = listed(tmp_path)
    assert [len(share) for share in found.shares] == [SHARE_FILES, 6]
    assert len(set(found.names)) == SHARE_FILES + 6
    assert (found.documents, found.exact) == (SHARE_FILES + 6, True)


def test_a_large_file_is_a_share_of_its_own(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", listing.SHARE_BYTES + 1), ("c", 10), ("d", 10)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    assert [[Path(file.name).name for file in share] for share in listed(tmp_path).shares] == [
        ["a.txt"],
        ["b.txt"],
        ["c.txt", "d.txt"],
    ]


def test_files_of_the_same_name_in_two_folders_are_told_apart_and_linked_folders_refused(tmp_path: Path) -> None:
    for year in ("2025", "2026"):
        (tmp_path / year / "notes").mkdir(parents=True)
        (tmp_path / year / "notes" / "a.txt").write_text("A line.")
    (tmp_path / "2026" / "notes" / "link").symlink_to(tmp_path)
    found = listed(tmp_path / "2025" / "notes", tmp_path / "2026" / "notes")
    assert sorted(found.names) == ["2026/notes/a.txt", "notes/a.txt"]
    assert ["linked folder" in str(each.error) for each in found.refused] == [True]


def test_a_file_that_is_named_twice_is_refused_the_second_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("A line.")
    found = listed(path, path)
    assert len(list(found.names)) == 1
    assert ["was already used" in str(each.error) for each in found.refused] == [True]
    assert found.documents == 2


@pytest.mark.parametrize(("end", "count"), [("", 3), ("\n", 3)])
def test_lines_are_counted(tmp_path: Path, end: str, count: int) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(['{"id": "x", "text": "A line."}'] * 3) + end)
    assert (listed(tmp_path).documents, listed(tmp_path).exact) == (count, True)


def test_the_lines_of_a_long_file_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("a line of text\n" * 1000)
    monkeypatch.setattr(listing, "SAMPLE", 1500)
    found = listed(tmp_path)
    assert found.documents == pytest.approx(1000, rel=0.02)
    assert not found.exact


def test_the_files_are_found_from_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("A line.")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    (file,) = listed(Path("a.txt")).shares[0]
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert file.name == "a.txt"
    assert file.fetch(tmp_path).read_text() == "A line."


def test_nothing_is_empty(tmp_path: Path) -> None:
    assert listed(tmp_path).empty
