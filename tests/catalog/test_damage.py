"""A catalogue that lacks a part of itself is refused at its start, with one line that says what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from ragkv.catalog import Catalog, tables
from ragkv.errors import CatalogCorrupt, ConfigError, RagkvError
from tests.program import ragkv

DERIVED = {"versions", "document_attributes"}
"""With SQLite they are made of the documents again."""
DAMAGES = (
    *(f"DROP TABLE IF EXISTS {name} CASCADE" for name in sorted(tables.metadata.tables)),
    "DROP TABLE alembic_version",
    "DELETE FROM alembic_version",
    "UPDATE alembic_version SET version_num = 'baseline'",
    "UPDATE alembic_version SET version_num = ''",
    "ALTER TABLE documents RENAME COLUMN reader TO whom",
    "ALTER TABLE jobs RENAME TO work",
)


def damage(where: Path | str, statement: str) -> None:
    if isinstance(where, Path):
        with closing(sqlite3.connect(where)) as connection, connection:
            connection.execute("PRAGMA legacy_alter_table = ON")  # what refers to a renamed table does not follow
            connection.execute(statement.removesuffix(" CASCADE"))
        connection.close()
    else:
        engine = create_engine(where)
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()


def one_line(error: RagkvError) -> bool:
    return "\n" not in str(error) and "[SQL" not in str(error)


@pytest.mark.parametrize("statement", DAMAGES)
def test_a_catalogue_without_a_part_of_itself_says_what_to_do(catalog_address: Path | str, statement: str) -> None:
    Catalog.open(catalog_address).close()
    damage(catalog_address, statement)
    if isinstance(catalog_address, Path) and DERIVED & set(statement.split()):
        return Catalog.open(catalog_address).close()
    with pytest.raises(CatalogCorrupt, match="restore a backup") as refused:
        Catalog.open(catalog_address)
    assert one_line(refused.value)
    return None


def test_what_is_no_catalogue_says_what_to_do(tmp_path: Path) -> None:
    folder, foreign, text = (tmp_path / name for name in ("folder.sqlite", "foreign.sqlite", "text.sqlite"))
    folder.mkdir()
    damage(foreign, "CREATE TABLE theirs (a)")
    text.write_text("This is not a database. " * 400)
    for path, kind in ((folder, ConfigError), (foreign, ConfigError), (text, CatalogCorrupt)):
        with pytest.raises(kind) as refused:
            Catalog.open(path)
        assert one_line(refused.value)
        assert str(path) in str(refused.value)


@pytest.mark.parametrize("command", [("ls",), ("ask", "who?"), ("serve", "--port", "0"), ("doctor",)])
def test_every_command_says_it_in_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    catalog = tmp_path / "data" / "catalog.sqlite"
    Catalog.open(catalog).close()
    damage(catalog, "DELETE FROM alembic_version")
    done = ragkv(*command, cwd=tmp_path)
    told = (done.stderr + done.stdout).replace("\n", " ")
    assert done.returncode in (1, 2)
    assert "Traceback" not in told
    assert "its version is missing" in " ".join(told.split())
    assert "restore a backup" in " ".join(told.split())
