"""A backup of a catalogue in SQLite is restored into an empty one in PostgreSQL: nothing is lost, and all KV is hit."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ragkv.admin.backup import write_backup
from ragkv.admin.restore import restore_backup
from ragkv.catalog import Catalog, copying, tables
from ragkv.catalog.models import DocumentOrder
from ragkv.cli import run
from ragkv.errors import ConfigError, InputError, InvalidBackup
from ragkv.ingest.pipeline import ingest, remove
from ragkv.types import AskOptions
from tests.ingest.reader import make_document
from tests.postgres_server import PostgresServer
from tests.quick import quick_engine, quick_settings

pytestmark = [pytest.mark.scale, pytest.mark.usefixtures("one_thread")]
RELEASE = Path(__file__).resolve().parents[1] / "catalog" / "release_1_0.sql"
QUESTION = "word1 word2 word3?"


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    """An empty database."""
    return postgres.database()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two documents, a conversation and a profile. The rows of a third document are gone."""
    folder = tmp_path_factory.mktemp("move") / "data"
    with quick_engine(folder) as engine:
        for name in "abc":
            ingest(engine, make_document(name, words=60, seed=ord(name)))
        engine.answer(QUESTION, AskOptions(top_k=5, conversation="talk"))
        remove(engine, "default", "c")
        engine.model.profile.save(folder / "profiles" / "0123abcd.json")
    return folder


@pytest.fixture(scope="module")
def backup(source: Path) -> Path:
    file = source.parent / "whole.tar"
    write_backup(file, quick_settings(source), with_kv=True)
    return file


def rows(catalog: Catalog) -> dict[str, list[tuple[Any, ...]]]:
    """All rows that move, by table."""
    found = {}
    with catalog.read() as transaction:
        for table in tables.metadata.sorted_tables:
            if table.name not in copying.HELD | tables.POSTGRESQL_ONLY:
                names = ", ".join(f'"{name}"' for name in table.c.keys())  # noqa: SIM118 (a collection of columns, no dict)
                found[table.name] = sorted(transaction.exec_driver_sql(f"SELECT {names} FROM {table.name}"), key=repr)
    return found


def test_a_service_moves_with_all_documents_conversations_and_kv(
    source: Path, backup: Path, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    data = tmp_path / "data"
    monkeypatch.setenv("RAGKV_CATALOG", address)
    assert run(["restore", str(backup), "--data", str(data)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 documents" in said
    assert "in the database" in said
    assert sorted(path.name for path in data.iterdir()) == ["kv", "profiles"]
    monkeypatch.delenv("RAGKV_CATALOG")
    with quick_engine(source) as before, quick_engine(data, catalog=address) as after:
        assert rows(after.catalog) == rows(before.catalog)
        for engine in (before, after):
            assert len(engine.catalog.turns("default", "talk")) == 1
        options = AskOptions(top_k=5, conversation="talk")
        one, other = (engine.answer(QUESTION, options) for engine in (before, after))
        assert one.answer == other.answer
        assert other.report.cache.misses == 0
        assert after.catalog.count() == (2, before.catalog.count()[1])
        ingest(after, make_document("d", words=60, seed=5))
        assert min(chunk_rows(after.catalog, "d")) > max(chunk_rows(before.catalog, "b"))
        assert len(after.catalog.turns("default", "talk")) == 2


def chunk_rows(catalog: Catalog, document: str) -> list[int]:
    with catalog.read() as transaction:
        sql = f"SELECT chunks.row FROM chunks JOIN documents ON documents.row = document WHERE id = '{document}'"
        return [row for (row,) in transaction.exec_driver_sql(sql)]


def test_a_row_that_is_gone_is_not_given_again(source: Path, backup: Path, address: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(source / "catalog.sqlite")) as file:
        given = dict(file.execute("SELECT name, seq FROM sqlite_sequence"))
        assert given["chunks"] > file.execute("SELECT max(row) FROM chunks").fetchone()[0]
    restore_backup(backup, quick_settings(tmp_path / "data", catalog=address), force=False)
    with quick_engine(tmp_path / "data", catalog=address) as engine:
        ingest(engine, make_document("d", words=60, seed=5))
        assert min(chunk_rows(engine.catalog, "d")) > given["chunks"]


def test_filters_and_words_of_listings_work_behind_a_move(address: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "kv").mkdir(parents=True)
    with closing(sqlite3.connect(source / "catalog.sqlite")) as file:
        file.executescript(RELEASE.read_text())
        with file:
            file.execute("""UPDATE documents SET metadata = '{"town": "Tarn", "years": [1902, 1904]}'""")
    write_backup(tmp_path / "file.tar", quick_settings(source), with_kv=False)
    restore_backup(tmp_path / "file.tar", quick_settings(tmp_path / "data", catalog=address), force=False)
    before, after = Catalog.open(source / "catalog.sqlite"), Catalog.open(address)
    try:
        assert rows(after) == rows(before)
        listed = before.documents(None)
        assert listed
        for document in listed:
            for catalog in (before, after):
                order = DocumentOrder(words=document.title.upper()[:5])
                assert document.id in {each.id for each in catalog.documents(document.collection, order)}
                for some in ({"town": "Tarn"}, {"years": 1904}):
                    page = catalog.page(document.collection, None, 10, some)
                    assert document.id in {each.id for each in page}
                assert not catalog.page(document.collection, None, 10, {"town": "Mell"})
    finally:
        before.close()
        after.close()


def test_a_database_with_documents_is_left_as_it_is(backup: Path, address: str, tmp_path: Path) -> None:
    settings = quick_settings(tmp_path / "data", catalog=address)
    restore_backup(backup, settings, force=False)
    catalog = Catalog.open(address)
    try:
        before = rows(catalog)
        for force in (False, True):
            with pytest.raises(InputError, match="has documents already; name an empty database"):
                restore_backup(backup, settings, force)
        assert rows(catalog) == before
    finally:
        catalog.close()


def test_a_fault_halfway_leaves_the_database_empty(
    backup: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick_settings(tmp_path / "data", catalog=address)
    monkeypatch.setattr(copying, "_continue_sequences", lambda source, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        restore_backup(backup, settings, force=False)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["kv"]
    cut = tmp_path / "cut.tar"
    cut.write_bytes(backup.read_bytes()[:-5000])
    with pytest.raises(InvalidBackup):
        restore_backup(cut, settings, force=False)
    unusable = quick_settings(tmp_path / "data", catalog=address, store="redis+cluster://127.0.0.1:1/5")
    with pytest.raises(ConfigError):
        restore_backup(backup, unusable, force=False)
    restore_backup(backup, settings, force=False)
