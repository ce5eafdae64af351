"""The segments of chunks. Those of chunks that are there are made when a question asks for them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "segments", "removals"

ROW = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "segments",
        sa.Column("chunk", ROW, sa.ForeignKey("chunks.row", ondelete="CASCADE"), primary_key=True, nullable=False),
        sa.Column("embedder", sa.Text, nullable=False),
        sa.Column("segments", sa.LargeBinary, nullable=False),
    )
