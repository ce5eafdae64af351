"""All tables as of version 1.0. Files of earlier releases get the tables and indexes that they lack."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql, sqlite

revision, down_revision = "baseline", None

ROW = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
REAL: sa.types.TypeEngine[float] = sqlite.REAL().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")


def upgrade() -> None:
    """Create what is not there."""
    _create_documents()
    _create_chunks()
    _create_claims_and_turns()
    _create_jobs()
    if op.get_bind().dialect.name == "postgresql":
        _create_attributes()


def _create(name: str, *parts: sa.schema.SchemaItem, **options: bool) -> None:
    op.create_table(name, *parts, if_not_exists=True, **options)


def _index(name: str, table: str, *columns: str) -> None:
    op.create_index(name, table, list(columns), if_not_exists=True)


def _row() -> sa.Column[int]:
    return sa.Column("row", ROW, primary_key=True)


def _refers(name: str, to: str, primary_key: bool = False) -> sa.Column[int]:
    return sa.Column(name, ROW, sa.ForeignKey(to, ondelete="CASCADE"), primary_key=primary_key, nullable=False)


def _columns(type_: sa.types.TypeEngine[Any], names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, type_, nullable=nullable) for name in names.split()]


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, NAME, primary_key=True, nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, ROW, nullable=False, server_default="0")


def _create_documents() -> None:
    _create("facts", _key("name"), *_columns(sa.Text(), "value"), sqlite_with_rowid=False)
    _create("collections", _key("name"), *_columns(ROW, "generation"), _number("replaced"), sqlite_with_rowid=False)
    _create(
        "documents",
        _row(),
        *(
            *_columns(NAME, "collection id"),
            *_columns(sa.Text(), "content_hash reader"),
            *_columns(ROW, "chunks tokens"),
        ),
        *(*_columns(REAL, "created updated"), *_columns(NAME, "title"), *_columns(sa.Text(), "metadata text")),
        sa.UniqueConstraint("collection", "id"),
    )
    _index("documents_in_short", "documents", "collection", "id", "chunks", "tokens")
    if op.get_bind().dialect.name == "postgresql":  # with SQLite, derived.py creates it together with its triggers
        _create(
            "versions",
            _refers("document", "documents.row", True),
            *(*_columns(ROW, "number bytes"), *_columns(sa.Text(), "pages")),
        )


def _create_chunks() -> None:
    _create(
        "chunks",
        *(_row(), _refers("document", "documents.row")),
        *(*_columns(NAME, "collection"), *_columns(ROW, "ordinal"), *_columns(sa.Text(), "key title text")),
        *_columns(sa.LargeBinary(), "tokens"),
        sa.UniqueConstraint("document", "ordinal"),
        sqlite_autoincrement=True,
    )
    on_postgresql = op.get_bind().dialect.name == "postgresql"
    _index("chunks_by_collection", "chunks", "collection", *(["row"] if on_postgresql else []))
    _index("chunks_by_key", "chunks", "key")
    for name in ("vectors", "next_vectors"):
        _create(name, _refers("chunk", "chunks.row", True), *_columns(sa.LargeBinary(), "vector"))
    _create(
        "spans",
        _refers("chunk", "chunks.row", True),
        *(*_columns(ROW, "start stop", True), *_columns(sa.Text(), "heading"), *_columns(ROW, "page", True)),
    )
    _create(
        "collection_embedders",
        *(_key("collection"), *_columns(sa.Text(), "name"), *_columns(ROW, "dimension")),
        sqlite_with_rowid=False,
    )


def _create_claims_and_turns() -> None:
    _create("claims", _row(), *_columns(REAL, "renewed"), sqlite_autoincrement=True)
    _create("claimed", _key("key"), _refers("claim", "claims.row", True), sqlite_with_rowid=False)
    _index("claimed_by_claim", "claimed", "claim")
    _create(
        "turns",
        _row(),
        *(
            *_columns(NAME, "collection conversation"),
            *_columns(sa.Text(), "method reader"),
            *_columns(REAL, "created"),
        ),
        *(*_columns(sa.Text(), "joined question answer"), *_columns(sa.LargeBinary(), "asked written")),
        sqlite_autoincrement=True,
    )
    _index("turns_by_conversation", "turns", "collection", "conversation")


def _create_jobs() -> None:
    _create(
        "jobs",
        _row(),
        sa.Column("id", sa.Text(), nullable=False, unique=True),
        *_columns(NAME, "collection"),
        *(*_columns(sa.Text(), "digest status stage"), *_columns(ROW, "done total")),
        *_columns(sa.Text(), "error_code error_message", True),
        *(*_columns(REAL, "created"), *_columns(REAL, "started", True)),
        *(*_columns(REAL, "updated"), *_columns(REAL, "finished", True)),
    )
    _index("jobs_by_status", "jobs", "status")
    _create(
        "job_documents",
        *(_refers("job", "jobs.row", True), sa.Column("position", ROW, primary_key=True, nullable=False)),
        *(*_columns(sa.Text(), "id status"), _number("attempts")),
        *_columns(sa.Text(), "error_code error_message payload", True),
    )
    _index("job_documents_by_status", "job_documents", "job", "status", "position")
    _index("job_documents_by_id", "job_documents", "id")
    _create("paces", _refers("job", "jobs.row", True), *_columns(REAL, "seconds rest", True))
    _create("job_senders", _refers("job", "jobs.row", True), *_columns(sa.Text(), "subject"))


def _create_attributes() -> None:
    _create(
        "document_attributes",
        _refers("document", "documents.row", True),
        *(*_columns(postgresql.JSONB(), "metadata"), *_columns(sa.Text(), "folded")),
    )
    op.create_index(
        "document_attributes_by_metadata",
        "document_attributes",
        ["metadata"],
        if_not_exists=True,
        postgresql_using="gin",
        postgresql_ops={"metadata": "jsonb_path_ops"},
    )
