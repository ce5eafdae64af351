"""Migrations of the catalogue's tables, run when a catalogue is opened. Each file in versions/ is one, for Alembic.

A change of tables.py needs a new file there and a new last entry of REVISIONS. A migration that has been released stays
as it is. An SQLite file of any release and an empty PostgreSQL database go through all of them.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Text, column, select, table

from ragkv.catalog import database, tables
from ragkv.catalog.transaction import Transaction
from ragkv.errors import ConfigError

REVISIONS = ("baseline", "leases", "removals", "segments", "sources", "files")
HEAD = REVISIONS[-1]

_RECORDED = select(column("version_num", Text)).select_from(table("alembic_version"))
_THERE = {
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'",
    "postgresql": "SELECT count(to_regclass('alembic_version'))",
}


_COLUMNS = {
    "sqlite": "SELECT one.name, part.name FROM sqlite_master AS one, pragma_table_info(one.name) AS part"
    " WHERE one.type = 'table' AND one.sql NOT LIKE 'CREATE VIRTUAL%'",
    "postgresql": "SELECT one.relname, part.attname FROM pg_class AS one JOIN pg_attribute AS part"
    " ON part.attrelid = one.oid WHERE pg_table_is_visible(one.oid) AND part.attnum > 0 AND NOT part.attisdropped",
}
_ELSEWHERE = {"sqlite": frozenset({"versions", "document_attributes"}), "postgresql": frozenset[str]()}
"""Tables that no migration creates: SQLite's derived ones are rebuilt where they are missing."""


def revision_of(transaction: Transaction) -> str | None:
    """Return the latest migration that has run; None if there was none, "" if the row that tells it is gone."""
    if not transaction.exec_driver_sql(_THERE[transaction.dialect]).fetchone()[0]:
        return None
    found: str | None = transaction.scalar(_RECORDED)
    return found or ""


def checked(revision: str | None, name: str) -> str | None:
    """Return the revision of the catalogue with this name.

    Raises:
        CatalogCorrupt: Nothing tells it any more.
        ConfigError: It is of a newer ragkv.
    """
    if revision == "":
        raise database.damaged(name, "its version is missing")
    if revision is not None and revision not in REVISIONS:
        raise ConfigError(f"the catalogue {name} was written by a newer ragkv (schema {revision!r}, known: {HEAD!r})")
    return revision


def check_tables(transaction: Transaction, name: str) -> None:
    """Check that the catalogue with this name has all tables and columns of HEAD. Raises CatalogCorrupt."""
    there: dict[str, set[str]] = {}
    for table_name, column_name in transaction.exec_driver_sql(_COLUMNS[transaction.dialect]):
        there.setdefault(table_name, set()).add(column_name)
    for wanted in tables.metadata.tables.values():
        if wanted.name in _ELSEWHERE[transaction.dialect]:
            continue
        if wanted.name not in there:
            raise database.damaged(name, f"the table {wanted.name} is missing")
        if lacking := {one.name for one in wanted.columns} - there[wanted.name]:
            raise database.damaged(name, f"the table {wanted.name} lacks the column {min(lacking)}")


def upgrade(connection: Connection) -> None:
    """Run the migrations that are missing, in the transaction of the caller, which must be the only one to do so."""
    # Alembic is imported where it is needed: most starts find the tables as they should be.
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(Path(__file__).parent))

    def missing(revision: object, context: object) -> object:
        return scripts._upgrade_revs(HEAD, revision)  # type: ignore[arg-type]

    with EnvironmentContext(Config(), scripts, fn=missing, destination_rev=HEAD) as environment:
        environment.configure(connection=connection, transactional_ddl=False)
        environment.run_migrations()
