"""The files of documents whose pages can be shown. Documents that are there get theirs when they are ingested again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "files", "sources"

ROW = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "files",
        sa.Column(
            "document", ROW, sa.ForeignKey("documents.row", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
        sa.Column("bytes", ROW, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
