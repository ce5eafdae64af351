"""The files that documents came from. Ids that are composed in two ways are one, so stored ones are composed (NFC).

An id stays as it is where a document has the composed one already.
"""

from __future__ import annotations

import unicodedata

import sqlalchemy as sa
from alembic import op

from ragkv.normalisation import folded

revision, down_revision = "sources", "segments"

ROW = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENTS = sa.table("documents", *map(sa.column, ("row", "collection", "id", "title")))
QUEUED = sa.table("job_documents", *map(sa.column, ("job", "position", "id")))
FOLDED = sa.table("document_attributes", *map(sa.column, ("document", "folded")))


def upgrade() -> None:
    """Add the table, and compose ids."""
    op.create_table(
        "sources",
        sa.Column(
            "document", ROW, sa.ForeignKey("documents.row", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
        sa.Column("path", sa.Text, nullable=False),
    )
    op.create_index("sources_by_path", "sources", ["path"])
    connection = op.get_bind()
    for row, collection, id, title in connection.execute(sa.select(DOCUMENTS)).all():
        new = unicodedata.normalize("NFC", id)
        if new != id and not _is_taken(connection, collection, new):
            connection.execute(sa.update(DOCUMENTS).where(DOCUMENTS.c.row == row).values(id=new))
        if connection.dialect.name == "postgresql" and not f"{id}{title}".isascii():
            named = folded(f"{new}\n{title}").casefold()
            connection.execute(sa.update(FOLDED).where(FOLDED.c.document == row).values(folded=named))
    for job, position, id in connection.execute(sa.select(QUEUED)).all():
        if (new := unicodedata.normalize("NFC", id)) != id:
            mine = (QUEUED.c.job == job, QUEUED.c.position == position)
            connection.execute(sa.update(QUEUED).where(*mine).values(id=new))


def _is_taken(connection: sa.Connection, collection: str, id: str) -> bool:
    same = sa.select(DOCUMENTS.c.row).where(DOCUMENTS.c.collection == collection, DOCUMENTS.c.id == id)
    return connection.execute(same).first() is not None
