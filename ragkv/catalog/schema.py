"""Tables of the catalogue. Large columns come last, so that listing a table does not read their overflow pages."""

APPLICATION_ID = 0x7261676B  # "ragk"; it distinguishes catalogues from other SQLite files
VERSION = 1

TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- generation: grows with every change · replaced: generation at which all vectors were last replaced
CREATE TABLE collections (
    name TEXT PRIMARY KEY, generation INTEGER NOT NULL, replaced INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

CREATE TABLE documents (
    row INTEGER PRIMARY KEY,
    collection TEXT NOT NULL, id TEXT NOT NULL,
    content_hash TEXT NOT NULL, reader TEXT NOT NULL,
    chunks INTEGER NOT NULL, tokens INTEGER NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL,
    title TEXT NOT NULL, metadata TEXT NOT NULL, text TEXT NOT NULL,
    UNIQUE (collection, id)
);

-- AUTOINCREMENT: a row number is never used twice, so a stale index can miss a chunk but never name a wrong one
CREATE TABLE chunks (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    document INTEGER NOT NULL REFERENCES documents (row) ON DELETE CASCADE,
    collection TEXT NOT NULL, ordinal INTEGER NOT NULL, key TEXT NOT NULL,
    title TEXT NOT NULL, text TEXT NOT NULL, tokens BLOB NOT NULL,
    UNIQUE (document, ordinal)
);
CREATE INDEX chunks_by_collection ON chunks (collection);
CREATE INDEX chunks_by_key ON chunks (key);

CREATE TABLE vectors (
    chunk INTEGER PRIMARY KEY REFERENCES chunks (row) ON DELETE CASCADE,
    vector BLOB NOT NULL
);

CREATE TABLE jobs (
    row INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE, collection TEXT NOT NULL, digest TEXT NOT NULL,
    status TEXT NOT NULL, stage TEXT NOT NULL, done INTEGER NOT NULL, total INTEGER NOT NULL,
    error_code TEXT, error_message TEXT,
    created REAL NOT NULL, started REAL, updated REAL NOT NULL, finished REAL
);
CREATE INDEX jobs_by_status ON jobs (status);

-- payload: the document as JSON, emptied when it is done with
CREATE TABLE job_documents (
    job INTEGER NOT NULL REFERENCES jobs (row) ON DELETE CASCADE,
    position INTEGER NOT NULL, id TEXT NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    error_code TEXT, error_message TEXT, payload TEXT,
    PRIMARY KEY (job, position)
);
"""
ADDED = (
    # See claims.py, turns.py, spans.py and the job tables of ingest. The first release of version 1 did not have these.
    # They are created where they are missing, and an older ragkv ignores them.
    "CREATE TABLE IF NOT EXISTS claims (row INTEGER PRIMARY KEY AUTOINCREMENT, renewed REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS claimed ("
    " key TEXT NOT NULL, claim INTEGER NOT NULL REFERENCES claims (row) ON DELETE CASCADE,"
    " PRIMARY KEY (key, claim)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS claimed_by_claim ON claimed (claim)",
    # AUTOINCREMENT: the rows of its turns distinguish a conversation from a removed one of the same name
    "CREATE TABLE IF NOT EXISTS turns (row INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL,"
    " conversation TEXT NOT NULL, method TEXT NOT NULL, reader TEXT NOT NULL, created REAL NOT NULL,"
    " joined TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, asked BLOB NOT NULL, written BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS turns_by_conversation ON turns (collection, conversation)",
    # Covers the counts of listings, so that texts are not read
    "CREATE INDEX IF NOT EXISTS documents_in_short ON documents (collection, id, chunks, tokens)",
    # The status of a large job is queried often
    "CREATE INDEX IF NOT EXISTS job_documents_by_status ON job_documents (job, status, position)",
    "CREATE INDEX IF NOT EXISTS job_documents_by_id ON job_documents (id)",
    # seconds: duration of one document of the job; rest: what the present document still needs; NULL if unknown
    "CREATE TABLE IF NOT EXISTS paces (job INTEGER PRIMARY KEY REFERENCES jobs (row) ON DELETE CASCADE,"
    " seconds REAL, rest REAL)",
    # Who sent a job, for the audit log
    "CREATE TABLE IF NOT EXISTS job_senders (job INTEGER PRIMARY KEY REFERENCES jobs (row) ON DELETE CASCADE,"
    " subject TEXT NOT NULL)",
    # start and stop: character offsets in the document's text; NULL where the chunk does not occur in it
    "CREATE TABLE IF NOT EXISTS spans (chunk INTEGER PRIMARY KEY REFERENCES chunks (row) ON DELETE CASCADE,"
    " start INTEGER, stop INTEGER, heading TEXT NOT NULL, page INTEGER)",
    # See embedders.py: while the embedder changes
    "CREATE TABLE IF NOT EXISTS collection_embedders (collection TEXT PRIMARY KEY, name TEXT NOT NULL,"
    " dimension INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS next_vectors (chunk INTEGER PRIMARY KEY REFERENCES chunks (row) ON DELETE CASCADE,"
    " vector BLOB NOT NULL)",
)
NAMES = frozenset({"facts", "collections", "documents", "chunks", "vectors", "jobs", "job_documents"})
