"""`ragkv ingest FOLDER --watch`: documents follow the files, in an engine of its own and in a service."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragkv.catalog import Catalog
from ragkv.cli import folder_sync, run
from ragkv.config import load_settings
from ragkv.ingest.source_files import SourceFile
from tests.api.conftest import serving, settings
from tests.forked import forked
from tests.program import ROOT
from tests.start_records import with_records

TARN = "The harbour of Tarn was built in 1889."


@contextmanager
def following(cwd: Path, *more: str) -> Iterator[Any]:
    """Run the program on the folder `notes`; its output goes to the file `log`."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "RAGKV_THREADS": "1", "RAGKV_DATA": str(cwd / "data")}
    with_records(cwd / "data")
    with forked(("ingest", "notes", "--watch", *more), cwd, environment, cwd / "log") as process:
        yield process


def wait_for(cwd: Path, line: str, count: int = 1) -> None:
    """Wait until the program has printed a line so often."""
    ends = time.monotonic() + 60
    while (cwd / "log").read_text().count(line) < count:
        assert time.monotonic() < ends, (cwd / "log").read_text()
        time.sleep(0.05)


def test_documents_follow_the_files_of_a_folder(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "tarn.md").write_text(TARN)
    (notes / "lines.jsonl").write_text('{"id": "one", "text": "First."}\n{"id": "two", "text": "Second."}\n')
    poison = f'{{"id": "deep", "text": "Third.", "metadata": {{"a": {"[" * 982}{"]" * 982}}}}}'
    (notes / "deep.jsonl").write_text(poison)  # is refused, and stops no other
    with following(tmp_path) as process:
        wait_for(tmp_path, "added      two")
        wait_for(tmp_path, "added      notes/tarn.md")
        (notes / "tarn.md").write_text(f"{TARN} It was closed in 1950.")
        (notes / "lines.jsonl").write_text('{"id": "two", "text": "Second."}\n')
        (notes / "new.txt").write_text("The bridge of Mell is green.")
        wait_for(tmp_path, "replaced   notes/tarn.md")
        wait_for(tmp_path, "removed    one")
        wait_for(tmp_path, "added      notes/new.txt")
        (notes / "new.txt").unlink()
        wait_for(tmp_path, "removed    notes/new.txt")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
    (notes / "tarn.md").unlink()
    with following(tmp_path) as process:  # what changed meanwhile is followed, too
        wait_for(tmp_path, "removed    notes/tarn.md")
        wait_for(tmp_path, "unchanged  two")
    catalog = Catalog.open(tmp_path / "data" / "catalog.sqlite")
    try:
        assert [info.id for info in catalog.documents("default")] == ["two"]
    finally:
        catalog.close()


def test_the_documents_of_a_service_follow(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "tarn.md").write_text(TARN)
    (tmp_path / "log").touch()
    with serving(settings(tmp_path / "service")) as service:
        with following(tmp_path, "--url", service.url):
            wait_for(tmp_path, "completed  notes/tarn.md")
            (tmp_path / "notes" / "tarn.md").unlink()
            (tmp_path / "notes" / "other.md").write_text("x")
            wait_for(tmp_path, "removed    notes/tarn.md")
        assert [each["id"] for each in service.client.get("/v1/documents").json()["documents"]] == ["notes/other.md"]


def test_only_folders_of_this_machine_can_be_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.md").write_text("one")
    for place in (str(tmp_path / "a.md"), "git+https://host/a", str(tmp_path / "nowhere")):
        assert run(["ingest", place, "--watch", "--data", str(tmp_path / "data")]) == 1
        assert "only folders of this machine" in capsys.readouterr().err


def test_a_line_that_goes_while_its_file_is_ingested_is_not_forgotten(tmp_path: Path) -> None:
    path, removed = tmp_path / "lines.jsonl", list[str]()
    path.write_text('{"id": "one", "text": "First."}\n{"id": "two", "text": "Second."}\n')

    class Target:
        def documents(self) -> list[tuple[str, str]]:
            return []

        def put(self, files: Sequence[SourceFile]) -> None:
            path.write_text('{"id": "two", "text": "Second."}\n')

        def remove(self, document_id: str) -> None:
            removed.append(document_id)

    lines = dict[str, set[str]]()
    for _ in range(2):
        folder_sync._put(Target(), {"lines.jsonl": path}, lines, load_settings())
    assert removed == ["one"]


def test_documents_of_another_folder_with_the_same_name_are_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder `notes` of another year has had the ids first."""
    for year in ("2025", "2026"):
        (tmp_path / year / "notes").mkdir(parents=True)
    (tmp_path / "2026" / "notes" / "new.md").write_text("x")
    monkeypatch.chdir(tmp_path / "2026")
    mine, theirs = str(tmp_path / "2026" / "notes"), str(tmp_path / "2025" / "notes")
    stored = [
        *(("notes/a.md", f"{theirs}/a.md"), ("2026/notes/a.md", f"{mine}/a.md"), ("notes/new.md", f"{mine}/new.md")),
        *(("notes/old.md", ""), ("sent", "")),
    ]
    earlier = dict(folder_sync._earlier(stored, [Path("notes")]))
    assert earlier == {
        "notes/a.md": Path("notes/a.md"),
        "notes/new.md": Path("notes/new.md"),
        "notes/old.md": Path(),
    }
    removed = list[str]()

    class Target:
        def documents(self) -> list[tuple[str, str]]:
            return stored

        def put(self, files: Sequence[SourceFile]) -> None:
            raise AssertionError

        def remove(self, document_id: str) -> None:
            removed.append(document_id)

    folder_sync._remove(Target(), {name: earlier[name] for name in ("notes/a.md", "notes/old.md")}, {})
    folder_sync._remove(Target(), {"notes/a.md": Path()}, {})  # where nothing tells that it is theirs but its source
    assert removed == ["2026/notes/a.md", "notes/old.md"]
