"""What a turn of a conversation read, so that its answer can be removed with a document.

Of the turns that are there, those lose their answers now that read a chunk which is gone, and those after them.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision, down_revision = "removals", "leases"

ROW = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TURNS = sa.table(
    "turns", *map(sa.column, ("row", "collection", "conversation", "joined", "answer", "written", "removed"))
)
CHUNKS = sa.table("chunks", sa.column("row"), sa.column("document"))
READ = sa.table("turn_documents", sa.column("turn"), sa.column("document"))
NAMES = (TURNS.c.row, TURNS.c.collection, TURNS.c.conversation, TURNS.c.joined)
NEXT = sa.select(*NAMES).where(TURNS.c.row > sa.bindparam("last")).order_by(TURNS.c.row).limit(500)


def upgrade() -> None:
    """Add the column and the table, and fill both."""
    op.add_column("turns", sa.Column("removed", ROW, nullable=False, server_default="0"))
    op.create_table(
        "turn_documents",
        sa.Column("turn", ROW, sa.ForeignKey("turns.row", ondelete="CASCADE"), primary_key=True, nullable=False),
        sa.Column(
            "document", ROW, sa.ForeignKey("documents.row", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("turn_documents_by_document", "turn_documents", ["document"])
    connection, last = op.get_bind(), 0
    without = set[tuple[str, str]]()
    while turns := connection.execute(NEXT, {"last": last}).all():
        last = turns[-1][0]
        for turn in turns:
            _fill(connection, *turn, without)


def _fill(
    connection: sa.Connection, turn: int, collection: str, conversation: str, joined: str, without: set[tuple[str, str]]
) -> None:
    """Note what a turn read. without: the conversations that have lost an answer, to which it may be added."""
    rows = {row for row, _ in json.loads(joined)}
    found = connection.execute(sa.select(CHUNKS.c.row, CHUNKS.c.document).where(CHUNKS.c.row.in_(rows))).all()
    for document in {document for _, document in found}:
        connection.execute(sa.insert(READ).values(turn=turn, document=document))
    if len(found) < len(rows):
        without.add((collection, conversation))
    if (collection, conversation) in without:
        connection.execute(sa.update(TURNS).where(TURNS.c.row == turn).values(answer="", written=b"", removed=1))
