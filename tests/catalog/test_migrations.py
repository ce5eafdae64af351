"""Migrations bring any catalogue to the tables of tables.py, and lose nothing."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from ragkv.catalog import Catalog, DocumentOrder, migrations, tables
from ragkv.errors import ConfigError, MissingPackage
from ragkv.ingest.jobs import Jobs
from tests.catalog.test_catalog import put
from tests.ingest.reader import FileEngine, run_next

RELEASE = Path(__file__).with_name("release_1_0.sql")


@pytest.fixture
def old(path: Path) -> Path:
    """A catalogue of version 1.0."""
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(RELEASE.read_text())
    connection.close()
    return path


def test_a_catalogue_of_version_1_0_keeps_everything(old: Path) -> None:
    catalog = Catalog.open(old)
    assert [(each.collection, each.id, each.title) for each in catalog.documents()] == [
        ("default", "a", "Harbours"),
        ("other", "ü", "Ünder"),
    ]
    info, document = catalog.info_and_original("default", "a")
    assert (info.version, info.created, info.content_hash) == (2, 1700000000.5, "hash a, changed")
    assert (document.text, document.metadata["year"]) == ("A red boat. The old harbour.", 2024)
    chunks = catalog.chunks_of("default", "a")
    assert [(chunk.text, chunk.tokens) for chunk in chunks] == [("A red boat.", (1, 2)), ("The old harbour.", (3, 4))]
    assert [chunk.span.page for chunk in chunks if chunk.span] == [None, 2]
    assert [row for row, _ in catalog.match("default", "boats", 5)] == [3]
    assert [each.id for each in catalog.page("default", None, 5, {"kind": "draft", "year": 2024})] == ["a"]
    rows, vectors = catalog.vectors("default")
    assert (rows.tolist(), vectors.argmax(1).tolist()) == ([3, 4], [0, 1])
    assert catalog.generations() == {"default": 1700000000000000000, "other": 1700000000000000005}
    assert catalog.embedder() is not None
    (turn,) = catalog.turns("default", "talk")
    assert (turn.row, turn.question, turn.answer, turn.joined) == (6, "Which boat?", "The red one.", ((3, "a#0"),))
    with catalog.removing(["key claimed", "key 3", "free"]) as free:  # type: ignore[list-item]
        assert free == {"free"}
    catalog.close()


def test_jobs_of_version_1_0_are_finished(old: Path) -> None:
    engine = FileEngine(old.parent)
    jobs = Jobs(engine.catalog, 100_000)
    assert jobs.recover() == 1, "no process has a lease on what was running"
    with engine.catalog.write() as transaction:  # the words of the fixture come from another embedder
        transaction.exec_driver_sql("UPDATE facts SET value = '[\"words\", 32]' WHERE name = 'embedder'")
        transaction.exec_driver_sql("DELETE FROM chunks")
    while run_next(jobs, engine):
        pass
    assert {job.id: job.status for job in jobs.recent()} == {
        "job done": "completed",
        "job running": "completed",
        "job queued": "completed",
    }
    assert engine.catalog.find("default", "b") is not None
    assert engine.catalog.find("other", "c") is not None
    engine.close()


def test_a_row_of_a_removed_chunk_is_not_used_again(old: Path) -> None:
    engine = FileEngine(old.parent)
    with engine.catalog.write() as transaction:
        sql = "INSERT INTO chunks (document, collection, ordinal, key, title, text, tokens)"
        transaction.exec_driver_sql(f"{sql} VALUES (2, 'other', 1, 'k', 't', 'text', x'')")
        assert transaction.exec_driver_sql("SELECT max(row) FROM chunks").fetchone() == (10,)
    engine.close()


def test_turns_of_version_1_0_lose_their_answers_with_their_documents(old: Path) -> None:
    """One whose chunk was gone before loses its answer at once."""
    with closing(sqlite3.connect(old)) as connection, connection:
        names = "collection, conversation, method, reader, created, joined, question, answer, asked, written"
        for joined, answer in (('[[3, "a#0"]]', "The red one."), ('[[1, "a#0"]]', "The old one."), ("[]", "So.")):
            row = ("default", "later", "full", "model", 0.0, joined, "Which?", answer, b"", b"\1\0\0\0")
            connection.execute(f"INSERT INTO turns ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    connection.close()
    catalog = Catalog.open(old)
    later = catalog.turns("default", "later")
    assert [(turn.answer, turn.written, turn.removed) for turn in later] == [
        ("The red one.", (1,), False),
        *[("", (), True)] * 2,
    ]
    catalog.remove("default", "a")
    for name in ("talk", "later"):
        assert {turn.answer for turn in catalog.turns("default", name)} == {""}
    catalog.close()


def test_ids_that_were_composed_in_two_ways_become_one_unless_both_are_there(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("UPDATE documents SET id = 'u\u0308' WHERE id = '\xfc'")
        connection.execute("UPDATE documents SET id = 'cafe\u0301' WHERE id = 'a'")
        rest = "'h', 'r', 0, 0, 0, 0, 't', '{}', 'x'"
        names = "collection, id, content_hash, reader, chunks, tokens, created, updated, title, metadata, text"
        connection.execute(f"INSERT INTO documents ({names}) VALUES ('default', 'caf\xe9', {rest})")
    connection.close()
    catalog = Catalog.open(old)
    assert {info.id for info in catalog.documents("other")} == {"\xfc"}
    assert {info.id for info in catalog.documents("default")} == {"cafe\u0301", "caf\xe9"}, "none is lost"
    catalog.close()


@pytest.mark.scale
def test_ids_in_a_database_are_composed_and_found_by_their_words(catalog_address: Path | str) -> None:
    if isinstance(catalog_address, Path):
        return
    catalog = Catalog.open(catalog_address)
    put(catalog, "cafe", ["text"])
    catalog.close()
    engine = create_engine(catalog_address)
    with engine.begin() as connection:
        for statement in (
            "UPDATE documents SET id = 'cafe\u0301'",
            "UPDATE document_attributes SET folded = 'cafe\u0301'",
            "DROP TABLE sources",
            "DROP TABLE files",
            "UPDATE alembic_version SET version_num = 'segments'",
        ):
            connection.exec_driver_sql(statement)
    engine.dispose()
    catalog = Catalog.open(catalog_address)
    assert [info.id for info in catalog.documents("default", DocumentOrder(words="caf\xe9"))] == ["caf\xe9"]
    catalog.close()


@pytest.mark.usefixtures("created_anew")
def test_migrated_and_new_catalogues_have_the_tables_of_the_code(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.sqlite"
    for path in (old, new):
        Catalog.open(path).close()
        assert _differences(f"sqlite:///{path}") == []


@pytest.mark.scale
def test_a_database_has_the_tables_of_the_code(catalog_address: Path | str) -> None:
    if isinstance(catalog_address, str):
        Catalog.open(catalog_address).close()
        assert _differences(catalog_address) == []


def _differences(url: str) -> list[object]:
    """Compare tables and columns; what only SQLite has is left out."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    extra = {"attributes", "chunk_words"}

    def compared(thing: object, name: str | None, kind: str, reflected: bool, other: object) -> bool:
        on_sqlite = url.startswith("sqlite")
        if kind == "table":
            derived = reflected and any(name == each or str(name).startswith(f"{each}_") for each in extra)
            return not (on_sqlite and (derived or name in tables.POSTGRESQL_ONLY))
        # PostgreSQL's index has one more column, see tables.py; it also is compared by expressions that it rewrites.
        return on_sqlite or kind not in ("index", "unique_constraint")

    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            options = {"include_object": compared, "compare_type": False}
            found = compare_metadata(MigrationContext.configure(connection, opts=options), tables.metadata)
            return [each for each in found if _kind(each) not in ("add_fk", "remove_fk", "modify_nullable")]
    finally:
        engine.dispose()


def _kind(difference: Any) -> str:
    """What differs. SQLAlchemy reads neither ON DELETE of a column nor NOT NULL of INTEGER PRIMARY KEY from SQLite."""
    return str(difference[0][0] if isinstance(difference, list) else difference[0])


def test_the_migrations_are_one_line_that_ends_with_the_head() -> None:
    from alembic.script import ScriptDirectory

    folder = Path(migrations.__file__).parent
    scripts = list(ScriptDirectory(str(folder)).walk_revisions())
    assert tuple(script.revision for script in reversed(scripts)) == migrations.REVISIONS


def test_a_file_with_a_migration_of_a_newer_version_is_refused(path: Path) -> None:
    Catalog.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = 'later'")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"newer ragkv.*'later'"):
        Catalog.open(path)
    assert path.read_bytes() == before


def test_processes_that_open_an_old_catalogue_at_once_migrate_it_once(old: Path, root: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from ragkv.catalog import Catalog;"
        " print(Catalog.open(Path(sys.argv[1])).count())"
    )
    command = [sys.executable, "-c", script, str(old)]
    processes = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["(2, 3)"] * 3


def test_without_the_driver_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingPackage, match=r"ragkv\[postgres\].*pip install 'psycopg"):
        Catalog.open("postgresql+psycopg://user:word@nowhere/name")


def test_a_file_needs_neither_the_driver_nor_alembic_once_it_is_migrated(path: Path, root: Path) -> None:
    Catalog.open(path).close()
    script = (
        "import sys; from pathlib import Path; from ragkv.catalog import Catalog; Catalog.open(Path(sys.argv[1]));"
        " print(sorted({'alembic', 'psycopg'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
