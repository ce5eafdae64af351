"""Which database a test of the catalogue needs."""

from __future__ import annotations

import sqlite3

import pytest

on_sqlite = pytest.mark.parametrize("catalog_address", ["sqlite"], indirect=True)
"""For a test of what only SQLite has. Tests with the fixture `catalog_address` run with both databases otherwise."""


def undo_migrations(connection: sqlite3.Connection) -> None:
    """Take away from a catalogue in a file what the migrations after the first have added."""
    connection.execute("DROP TABLE alembic_version")
    connection.execute("DROP TABLE leases")
    connection.execute("DROP TABLE segments")
    connection.execute("DROP TABLE sources")
    connection.execute("DROP TABLE files")
    connection.execute("DROP TABLE turn_documents")
    connection.execute("ALTER TABLE turns DROP COLUMN removed")
