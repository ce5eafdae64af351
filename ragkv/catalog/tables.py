"""Tables of the catalogue. Large columns come last, so that listing a table does not read their overflow pages.

The migrations create these tables; a test compares them with this file. SQLite has triggers and two tables besides
(derived.py, full_text.py), PostgreSQL has `document_attributes`.
"""

from __future__ import annotations

from sqlalchemy import (
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB

from ragkv.catalog.statements import NAME, REAL, ROW

metadata = MetaData()


def _row() -> Column[int]:
    return Column("row", ROW, primary_key=True)


def _refers(name: str, to: str, primary_key: bool = False) -> Column[int]:
    return Column(name, ROW, ForeignKey(to, ondelete="CASCADE"), primary_key=primary_key, nullable=False)


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _name(name: str, primary_key: bool = False) -> Column[str]:
    return Column(name, NAME, primary_key=primary_key, nullable=False)


def _number(name: str) -> Column[int]:
    return Column(name, ROW, nullable=False)


def _time(name: str, nullable: bool = False) -> Column[float]:
    return Column(name, REAL, nullable=nullable)


facts = Table("facts", metadata, _name("name", True), _text("value"), sqlite_with_rowid=False)

# generation: grows with every change · replaced: generation at which all vectors were last replaced
collections = Table(
    "collections",
    metadata,
    _name("name", True),
    _number("generation"),
    Column("replaced", ROW, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)

documents = Table(
    "documents",
    metadata,
    _row(),
    *(_name("collection"), _name("id"), _text("content_hash"), _text("reader"), _number("chunks"), _number("tokens")),
    *(_time("created"), _time("updated"), _name("title"), _text("metadata"), _text("text")),
    UniqueConstraint("collection", "id"),
    # Covers the counts of listings, so that texts are not read
    Index("documents_in_short", "collection", "id", "chunks", "tokens"),
)

# number: counts the contents that the document has had · bytes: of the text in UTF-8 · pages: see `Document.pages`
versions = Table(
    "versions",
    metadata,
    _refers("document", "documents.row", True),
    *(_number("number"), _number("bytes"), _text("pages")),
)

# path: of the file that a document came from, on the machine that read it
sources = Table(
    "sources",
    metadata,
    *(_refers("document", "documents.row", True), _text("path")),
    Index("sources_by_path", "path"),
)

# content: of the file that a document was read from, where its pages can be shown · bytes: of the content
files = Table(
    "files",
    metadata,
    *(_refers("document", "documents.row", True), _number("bytes")),
    Column("content", LargeBinary, nullable=False),
)

# AUTOINCREMENT: a row number is never used twice, so a stale index can miss a chunk but never name a wrong one. A
# sequence of PostgreSQL gives the same guarantee.
chunks = Table(
    "chunks",
    metadata,
    _row(),
    _refers("document", "documents.row"),
    *(_name("collection"), _number("ordinal"), _text("key"), _text("title"), _text("text")),
    Column("tokens", LargeBinary, nullable=False),
    UniqueConstraint("document", "ordinal"),
    Index(
        "chunks_by_collection", "collection"
    ),  # with PostgreSQL also "row", which an index of SQLite ends with anyway
    Index("chunks_by_key", "key"),
    sqlite_autoincrement=True,
)

# start and stop: character offsets in the document's text; NULL where the chunk does not occur in it
spans = Table(
    "spans",
    metadata,
    _refers("chunk", "chunks.row", True),
    *(Column("start", ROW), Column("stop", ROW), _text("heading"), Column("page", ROW)),
)

vectors = Table(
    "vectors", metadata, _refers("chunk", "chunks.row", True), Column("vector", LargeBinary, nullable=False)
)

# See segments.py. embedder: which of them made the segments
segments = Table(
    "segments",
    metadata,
    _refers("chunk", "chunks.row", True),
    *(_text("embedder"), Column("segments", LargeBinary, nullable=False)),
)

# See embedders.py: while the embedder changes
next_vectors = Table(
    "next_vectors", metadata, _refers("chunk", "chunks.row", True), Column("vector", LargeBinary, nullable=False)
)
collection_embedders = Table(
    "collection_embedders",
    metadata,
    *(_name("collection", True), _text("name"), _number("dimension")),
    sqlite_with_rowid=False,
)

# See claims.py
claims = Table("claims", metadata, _row(), _time("renewed"), sqlite_autoincrement=True)
claimed = Table(
    "claimed",
    metadata,
    _name("key", True),
    _refers("claim", "claims.row", True),
    Index("claimed_by_claim", "claim"),
    sqlite_with_rowid=False,
)

# See turns.py. AUTOINCREMENT: the rows of its turns distinguish a conversation from a removed one of the same name ·
# removed: 1 where the answer was removed with a document
turns = Table(
    "turns",
    metadata,
    _row(),
    *(_name("collection"), _name("conversation"), _text("method"), _text("reader"), _time("created")),
    *(_text("joined"), _text("question"), _text("answer")),
    *(Column("asked", LargeBinary, nullable=False), Column("written", LargeBinary, nullable=False)),
    Column("removed", ROW, nullable=False, server_default="0"),
    Index("turns_by_conversation", "collection", "conversation"),
    sqlite_autoincrement=True,
)

# Which documents a turn added chunks of to its conversation. A row of a document stays when its content is replaced
turn_documents = Table(
    "turn_documents",
    metadata,
    _refers("turn", "turns.row", True),
    _refers("document", "documents.row", True),
    Index("turn_documents_by_document", "document"),
    sqlite_with_rowid=False,
)

# The job tables belong to ingest/job_table.py.
jobs = Table(
    "jobs",
    metadata,
    _row(),
    *(Column("id", Text, nullable=False, unique=True), _name("collection"), _text("digest")),
    *(_text("status"), _text("stage"), _number("done"), _number("total")),
    *(Column("error_code", Text), Column("error_message", Text)),
    *(_time("created"), _time("started", True), _time("updated"), _time("finished", True)),
    Index("jobs_by_status", "status"),
)

# payload: the document as JSON, emptied when it is done with
job_documents = Table(
    "job_documents",
    metadata,
    _refers("job", "jobs.row", True),
    *(Column("position", ROW, primary_key=True, nullable=False), _text("id"), _text("status")),
    Column("attempts", ROW, nullable=False, server_default="0"),
    *(Column("error_code", Text), Column("error_message", Text), Column("payload", Text)),
    # The status of a large job is queried often
    Index("job_documents_by_status", "job", "status", "position"),
    Index("job_documents_by_id", "id"),
)

# Who ingests a running document, and until when that holds
leases = Table(
    "leases",
    metadata,
    Column("job", ROW, primary_key=True, nullable=False, autoincrement=False),
    Column("position", ROW, primary_key=True, nullable=False, autoincrement=False),
    *(_text("worker"), _time("expires")),
    ForeignKeyConstraint(["job", "position"], ["job_documents.job", "job_documents.position"], ondelete="CASCADE"),
    Index("leases_by_worker", "worker"),
)

# seconds: duration of one document of the job; rest: what the present document still needs; NULL if unknown
paces = Table("paces", metadata, _refers("job", "jobs.row", True), _time("seconds", True), _time("rest", True))

# Who sent a job, for the audit log
job_senders = Table("job_senders", metadata, _refers("job", "jobs.row", True), _text("subject"))

# PostgreSQL alone: what filters and the words of listings look at. metadata: of the document · folded: its id and title
document_attributes = Table(
    "document_attributes",
    metadata,
    _refers("document", "documents.row", True),
    *(Column("metadata", JSONB, nullable=False), _text("folded")),
    Index(
        "document_attributes_by_metadata",
        "metadata",
        postgresql_using="gin",
        postgresql_ops={"metadata": "jsonb_path_ops"},
    ),
)
POSTGRESQL_ONLY = frozenset({"document_attributes"})
