"""A backup holds one consistent state and restores it completely, or fails with a reason and changes nothing."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.admin.archive import MANIFEST, ArchiveWriter
from ragkv.admin.backup import BackupContents, write_backup
from ragkv.admin.restore import restore_backup
from ragkv.cli import run
from ragkv.errors import ConfigError, InputError, InvalidBackup, StoreUnavailable
from ragkv.ingest.pipeline import content_hash, ingest, remove
from ragkv.report import Answer
from ragkv.types import AskOptions
from tests.ingest.reader import make_document
from tests.quick import quick_engine, quick_settings
from tests.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
QUESTION = "word1 word2 word3?"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with three documents and a profile. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("backup") / "data"
    with quick_engine(folder) as engine:
        for name in "abc":
            ingest(engine, make_document(name, words=60, seed=ord(name)))
        engine.model.profile.save(folder / "profiles" / "0123abcd.json")
    return folder


@pytest.fixture(scope="module")
def full_backup(source: Path) -> Path:
    """A backup of `source` with its KV."""
    file = source.parent / "whole.tar"
    write_backup(file, quick_settings(source), with_kv=True)
    return file


def answer(folder: Path, **settings: object) -> Answer:
    with quick_engine(folder, **settings) as engine:
        return engine.answer(QUESTION, AskOptions(top_k=5))


def state(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes, except the files that SQLite keeps beside an open database."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# Backup and restore


def test_a_backup_with_kv_is_restored_with_all_cache_hits(source: Path, full_backup: Path, tmp_path: Path) -> None:
    before = answer(source)
    done = restore_backup(full_backup, quick_settings(tmp_path / "data"), force=False)
    assert (done.found.documents, done.found.profiles, done.aside) == (3, 1, None)
    assert done.stored == done.found.entries == done.found.chunks
    after = answer(tmp_path / "data")
    assert (after.answer, after.citations) == (before.answer, before.citations)
    assert after.report.cache.hits.store == after.report.cache.chunks
    assert after.report.chunks == before.report.chunks
    kept = ("kv/", "profiles/")
    old, new = state(source), state(tmp_path / "data")
    assert {name: data for name, data in new.items() if name.startswith(kept)} == {
        name: data for name, data in old.items() if name.startswith(kept)
    }
    assert temporary_files(tmp_path) == temporary_files(source.parent) == []


def test_without_kv_everything_is_encoded_again(source: Path, full_backup: Path, tmp_path: Path) -> None:
    before = answer(source)
    small = tmp_path / "small.tar"
    found = write_backup(small, quick_settings(source), with_kv=False)
    assert found.entries == 0
    assert small.stat().st_size < full_backup.stat().st_size
    assert small.stat().st_mode & 0o777 == 0o600, "it holds the documents"
    assert restore_backup(small, quick_settings(tmp_path / "data"), force=False).stored == 0
    first, second = answer(tmp_path / "data"), answer(tmp_path / "data")
    assert first.answer == second.answer == before.answer
    assert first.report.cache.misses == first.report.cache.chunks
    assert second.report.cache.misses == 0


def test_a_backup_moves_between_backends(source: Path, full_backup: Path, tmp_path: Path, server: RedisServer) -> None:
    before = answer(source)
    first, second = tmp_path / "first", tmp_path / "second"
    assert restore_backup(full_backup, quick_settings(first, store=server.url), force=False).stored > 0
    assert not (first / "kv").exists()
    assert answer(first, store=server.url).report.ratios.cache_hit == 1.0
    again = tmp_path / "again.tar"
    write_backup(again, quick_settings(first, store=server.url), with_kv=True)
    restore_backup(again, quick_settings(second), force=False)
    after = answer(second)
    assert (after.answer, after.report.ratios.cache_hit) == (before.answer, 1.0)


def test_any_tar_can_read_it(full_backup: Path) -> None:
    with tarfile.open(full_backup) as tar:
        names = tar.getnames()
        manifest = json.loads(tar.extractfile(MANIFEST).readline())  # type: ignore[union-attr]
    assert (names[0], names[-1]) == ("ragkv-backup", MANIFEST)
    assert {"catalog.sqlite", "profiles/0123abcd.json"} < set(names)
    assert (manifest["format"], manifest["documents"]) == (1, 3)


def test_a_backup_holds_one_state_while_documents_change(tmp_path: Path) -> None:
    versions = [make_document("a", words=40 + 40 * n, seed=n) for n in range(3)]
    with quick_engine(tmp_path / "data") as engine:
        ingest(engine, versions[0])
        errors, made = list[Exception](), list[Path]()

        def back_up() -> None:
            try:
                for number in range(6):
                    made.append(tmp_path / f"{number}.tar")
                    write_backup(made[-1], quick_settings(tmp_path / "data"), with_kv=True)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=back_up)
        thread.start()
        step = 0
        while thread.is_alive():
            step += 1
            ingest(engine, versions[step % 3])
            if step % 5 == 0:
                remove(engine, "default", "a")
        thread.join()
    assert not errors
    for number, file in enumerate(made):
        folder = tmp_path / f"restored-{number}"
        done = restore_backup(file, quick_settings(folder), force=False)
        with quick_engine(folder) as engine:
            documents = engine.catalog.documents()
            assert [d.content_hash in {content_hash(v) for v in versions} for d in documents] in ([], [True])
            assert set(engine.store.keys()) <= engine.catalog.keys()
            assert done.stored == done.found.entries
            if documents:
                answered = engine.answer(QUESTION, AskOptions(top_k=20))
                assert answered.report.cache.chunks == done.found.chunks
                assert answered.report.cache.misses == done.found.chunks - done.found.entries


def test_a_damaged_or_missing_entry_is_left_out(source: Path, tmp_path: Path) -> None:
    with quick_engine(tmp_path / "data") as engine:
        ingest(engine, make_document("a", words=60))
        first, second, *others = sorted((tmp_path / "data" / "kv").glob("??/*.kv"))
    first.unlink()
    os.truncate(second, 5000)
    file = tmp_path / "file.tar"
    assert write_backup(file, quick_settings(tmp_path / "data"), with_kv=True).entries == len(others)
    assert restore_backup(file, quick_settings(tmp_path / "new"), force=False).stored == len(others)


# What is refused


def test_only_an_older_backup_is_overwritten(source: Path, full_backup: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.tar"
    old.write_bytes(full_backup.read_bytes()[:4096])
    write_backup(old, quick_settings(source), with_kv=False)
    assert restore_backup(old, quick_settings(tmp_path / "data"), force=False).found.documents == 3
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    with pytest.raises(InputError, match="is no backup"):
        write_backup(notes, quick_settings(source), with_kv=False)
    assert notes.read_text() == "mine"


def test_a_folder_without_a_catalogue_cannot_be_backed_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no catalogue"):
        write_backup(tmp_path / "file.tar", quick_settings(tmp_path / "typo"), with_kv=False)
    assert list(tmp_path.iterdir()) == []


def test_an_unavailable_store_fails_the_backup_and_leaves_no_file(source: Path, tmp_path: Path) -> None:
    with redis_server() as stopped:
        url = stopped.url
    with pytest.raises(StoreUnavailable):
        write_backup(tmp_path / "file.tar", quick_settings(source, store=url), with_kv=True)
    assert list(tmp_path.iterdir()) == []


def test_a_restore_without_a_store_only_lacks_the_kv(full_backup: Path, tmp_path: Path) -> None:
    with redis_server() as stopped:
        url = stopped.url
    done = restore_backup(full_backup, quick_settings(tmp_path / "data", store=url), force=False)
    assert (done.stored, done.found.documents) == (0, 3)
    with quick_engine(tmp_path / "data") as engine:
        assert engine.catalog.count()[0] == 3


def test_a_folder_in_use_is_replaced_only_by_force_and_kept_aside(
    source: Path, full_backup: Path, tmp_path: Path
) -> None:
    with quick_engine(tmp_path / "data") as engine:
        ingest(engine, make_document("mine", words=20))
    before = state(tmp_path / "data")
    with pytest.raises(InputError, match="--force"):
        restore_backup(full_backup, quick_settings(tmp_path / "data"), force=False)
    assert state(tmp_path / "data") == before
    aside = restore_backup(full_backup, quick_settings(tmp_path / "data"), force=True).aside
    assert aside is not None
    assert state(aside) == before
    assert answer(tmp_path / "data").report.ratios.cache_hit == 1.0


@pytest.mark.parametrize("where", [0, 257, 512, 1024, 0.1, 0.3, 0.5, 0.7, 0.9, -1500, "any"])
def test_a_flipped_bit_is_found_before_anything_changes(full_backup: Path, tmp_path: Path, where: float | str) -> None:
    data = bytearray(full_backup.read_bytes())
    rng = random.Random(7)
    for _ in range(25 if where == "any" else 1):
        at = rng.randrange(len(data) - 1400) if where == "any" else where
        at = int(at * len(data)) if isinstance(at, float) else at  # type: ignore[operator]
        data[at] ^= 0x10
        (tmp_path / "bad.tar").write_bytes(data)
        with pytest.raises(InvalidBackup):
            restore_backup(tmp_path / "bad.tar", quick_settings(tmp_path / "data"), force=True)
        data[at] ^= 0x10
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def test_a_truncated_backup_is_refused(full_backup: Path, tmp_path: Path) -> None:
    data = full_backup.read_bytes()
    for size in (0, 1, 511, 512, 1023, 1024, 5000, len(data) // 3, len(data) // 2, len(data) - 1025, len(data) - 2048):
        (tmp_path / "cut.tar").write_bytes(data[:size])
        with pytest.raises(InvalidBackup):
            restore_backup(tmp_path / "cut.tar", quick_settings(tmp_path / "data"), force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["cut.tar"]


@pytest.mark.parametrize(
    "name",
    [
        "../../evil",
        "/etc/evil",
        "profiles/../../evil.json",
        "kv/../evil",
        "profiles/a/b.json",
        "other",
        "kv/" + "A" * 64,
    ],
)
def test_an_unexpected_member_name_is_refused(tmp_path: Path, name: str) -> None:
    manifest = BackupContents(1, 1, 1, 0, 0, 0.0).__dict__ | {"format": 1}
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    writer.add("ragkv-backup", b"ragkv backup 1\n")
    writer.add(name, b"evil")
    writer.write_manifest(manifest)
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "bad.tar"
    path.write_bytes(file.getvalue())
    with pytest.raises(InvalidBackup, match="which no backup holds"):
        restore_backup(path, quick_settings(tmp_path / "inner" / "data"), force=False)
    assert [found.name for found in tmp_path.rglob("*")] == ["inner", "bad.tar"]


def test_links_are_refused(full_backup: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        with tarfile.open(full_backup) as source:
            mark = source.next()
            assert mark is not None
            tar.addfile(mark, source.extractfile(mark))
        link = tarfile.TarInfo("catalog.sqlite")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(InvalidBackup, match="which no backup holds"):
        restore_backup(tmp_path / "link.tar", quick_settings(tmp_path / "data"), force=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"format": 2}, "format 2"), ({"documents": None}, "documents"), ({}, "without a catalogue")],
    ids=["a newer format", "a field is missing", "the catalogue is missing"],
)
def test_an_archive_with_a_wrong_manifest_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    manifest = {"format": 1, **BackupContents(1, 1, 0, 0, 0, 0.0).__dict__, **change}
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    writer.add("ragkv-backup", b"ragkv backup 1\n")
    writer.write_manifest({name: value for name, value in manifest.items() if value is not None})
    (tmp_path / "bad.tar").write_bytes(file.getvalue())
    with pytest.raises(InvalidBackup, match=message):
        restore_backup(tmp_path / "bad.tar", quick_settings(tmp_path / "data"), force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def test_a_catalogue_of_a_newer_ragkv_is_refused_and_nothing_changes(source: Path, tmp_path: Path) -> None:
    with quick_engine(tmp_path / "data") as engine:
        ingest(engine, make_document("a", words=20))
        with engine.catalog.write() as connection:
            connection.exec_driver_sql("PRAGMA user_version = 99")
    data = (tmp_path / "data" / "catalog.sqlite").read_bytes()
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    writer.add("ragkv-backup", b"ragkv backup 1\n")
    writer.add("catalog.sqlite", data)
    writer.write_manifest({"format": 1, **BackupContents(1, 1, 0, 0, 0, 0.0).__dict__})
    (tmp_path / "newer.tar").write_bytes(file.getvalue())
    with pytest.raises(ConfigError, match="newer ragkv"):
        restore_backup(tmp_path / "newer.tar", quick_settings(tmp_path / "new"), force=False)
    assert not (tmp_path / "new").exists()
    assert temporary_files(tmp_path) == []


# Crashes


KILLED = """
import os, signal, sys
from pathlib import Path
from ragkv.admin.backup import write_backup
from ragkv.admin.restore import restore_backup
from ragkv.config import load_settings

os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
os.replace = os.rename
run = restore_backup if sys.argv[1] == "restore" else write_backup
run(Path(sys.argv[2]), load_settings(data=Path(sys.argv[3])), False)
"""


@pytest.mark.parametrize("action", ["restore", "write"])
def test_a_crash_before_the_end_leaves_the_old_state(
    source: Path, full_backup: Path, tmp_path: Path, action: str
) -> None:
    file, folder = tmp_path / "file.tar", tmp_path / "data"
    file.write_bytes(full_backup.read_bytes())
    data = folder if action == "restore" else source
    command = [sys.executable, "-c", KILLED, action, file, data]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert file.read_bytes() == full_backup.read_bytes()
    assert not folder.exists()
    restore_backup(file, quick_settings(folder), force=False)
    assert answer(folder).report.ratios.cache_hit == 1.0


def test_a_failed_rename_puts_the_old_folder_back(
    full_backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick_engine(tmp_path / "data") as engine:
        ingest(engine, make_document("mine", words=20))
    before, rename = state(tmp_path / "data"), os.rename

    def fails_once(old: Path, new: Path) -> None:
        if old.name == "data" and old.parent.name.endswith(".tmp"):
            raise OSError("no")
        rename(old, new)

    monkeypatch.setattr(os, "rename", fails_once)
    with pytest.raises(OSError, match="no"):
        restore_backup(full_backup, quick_settings(tmp_path / "data"), force=True)
    assert state(tmp_path / "data") == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


MOUNT = """
import sys
from pathlib import Path
from ragkv.admin.restore import restore_backup
from ragkv.catalog import Catalog
from ragkv.config import load_settings
from ragkv.errors import InputError
from ragkv.store.disk_store import DiskStore

disk = Path(sys.argv[1])
assert disk.is_mount()
done = restore_backup(Path(sys.argv[2]), load_settings(data=disk), force=False)
assert sorted(path.name for path in disk.iterdir()) == ["catalog.sqlite", "kv", "profiles"], list(disk.iterdir())
assert set(DiskStore(disk / "kv").keys()) == Catalog.open(disk / "catalog.sqlite").keys()
try:
    restore_backup(Path(sys.argv[2]), load_settings(data=disk), force=True)
    sys.exit("it replaced the root of a disk")
except InputError as error:
    print(error)
"""


def test_the_root_of_an_empty_disk_takes_a_backup(full_backup: Path, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs none {tmp_path}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this kernel does not let us mount a disk")
    script = f'{mount} && exec "$0" -c "$1" {tmp_path} {full_backup}'
    command = ["unshare", "-Urm", "sh", "-c", script, sys.executable, MOUNT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert "empty it" in done.stdout, done.stderr


# Commands


def test_the_commands_report_what_they_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.tar"
    assert run(["backup", str(file), "--with-kv", "--data", str(source)]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert run(["restore", str(file), "--data", str(tmp_path / "data")]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert run(["restore", str(file), "--data", str(tmp_path / "data")]) == 1
    assert "--force" in capsys.readouterr().err
    assert run(["restore", str(file), "--data", str(tmp_path / "data"), "--force"]) == 0
    assert "before-" in capsys.readouterr().err
    file.write_bytes(b"not a backup")
    assert run(["restore", str(file), "--data", str(tmp_path / "other")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ragkv: ")
    assert "no backup" in error
    assert run(["restore", str(tmp_path / "missing.tar"), "--data", str(tmp_path / "other")]) == 1
    assert not (tmp_path / "other").exists()
