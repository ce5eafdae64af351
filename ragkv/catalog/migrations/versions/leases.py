"""The table of leases: which process ingests a running document."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql, sqlite

revision, down_revision = "leases", "baseline"

ROW = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
REAL: sa.types.TypeEngine[float] = sqlite.REAL().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "leases",
        sa.Column("job", ROW, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("position", ROW, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("expires", REAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["job", "position"], ["job_documents.job", "job_documents.position"], ondelete="CASCADE"
        ),
    )
    op.create_index("leases_by_worker", "leases", ["worker"])
