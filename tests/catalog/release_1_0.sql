-- A catalogue as version 1.0 wrote it: its tables, its triggers, and a little of everything in them.
PRAGMA journal_mode = WAL;
PRAGMA application_id = 1918986091;
PRAGMA user_version = 1;
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
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
CREATE TABLE job_documents (
    job INTEGER NOT NULL REFERENCES jobs (row) ON DELETE CASCADE,
    position INTEGER NOT NULL, id TEXT NOT NULL, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    error_code TEXT, error_message TEXT, payload TEXT,
    PRIMARY KEY (job, position)
);
CREATE VIRTUAL TABLE chunk_words USING fts5(
    title, text, content='chunks', content_rowid='row', tokenize='porter unicode61 remove_diacritics 2'
);
CREATE TRIGGER chunk_words_insert AFTER INSERT ON chunks BEGIN
        INSERT INTO chunk_words (rowid, title, text) VALUES (new.row, new.title, new.text);
    END;
CREATE TRIGGER chunk_words_delete AFTER DELETE ON chunks BEGIN
        INSERT INTO chunk_words (chunk_words, rowid, title, text)
        VALUES ('delete', old.row, old.title, old.text);
    END;
CREATE TABLE claims (row INTEGER PRIMARY KEY AUTOINCREMENT, renewed REAL NOT NULL);
CREATE TABLE claimed ( key TEXT NOT NULL, claim INTEGER NOT NULL REFERENCES claims (row) ON DELETE CASCADE, PRIMARY KEY (key, claim)) WITHOUT ROWID;
CREATE INDEX claimed_by_claim ON claimed (claim);
CREATE TABLE turns (row INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL, conversation TEXT NOT NULL, method TEXT NOT NULL, reader TEXT NOT NULL, created REAL NOT NULL, joined TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, asked BLOB NOT NULL, written BLOB NOT NULL);
CREATE INDEX turns_by_conversation ON turns (collection, conversation);
CREATE INDEX documents_in_short ON documents (collection, id, chunks, tokens);
CREATE INDEX job_documents_by_status ON job_documents (job, status, position);
CREATE INDEX job_documents_by_id ON job_documents (id);
CREATE TABLE paces (job INTEGER PRIMARY KEY REFERENCES jobs (row) ON DELETE CASCADE, seconds REAL, rest REAL);
CREATE TABLE job_senders (job INTEGER PRIMARY KEY REFERENCES jobs (row) ON DELETE CASCADE, subject TEXT NOT NULL);
CREATE TABLE spans (chunk INTEGER PRIMARY KEY REFERENCES chunks (row) ON DELETE CASCADE, start INTEGER, stop INTEGER, heading TEXT NOT NULL, page INTEGER);
CREATE TABLE collection_embedders (collection TEXT PRIMARY KEY, name TEXT NOT NULL, dimension INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE next_vectors (chunk INTEGER PRIMARY KEY REFERENCES chunks (row) ON DELETE CASCADE, vector BLOB NOT NULL);
CREATE TABLE attributes (collection TEXT, key TEXT, type TEXT, value, document INTEGER, PRIMARY KEY (collection, key, type, value, document)) WITHOUT ROWID;
CREATE INDEX attributes_by_document ON attributes (document);
CREATE TRIGGER attributes_insert AFTER INSERT ON documents BEGIN 
INSERT OR IGNORE INTO attributes
SELECT new.collection, one.key, replace(one.type, 'integer', 'real'), ifnull(one.atom, ''), new.row
FROM  json_each(new.metadata) AS one WHERE one.type NOT IN ('array', 'object')
UNION ALL
SELECT new.collection, list.key, replace(one.type, 'integer', 'real'), ifnull(one.atom, ''), new.row
FROM  json_each(new.metadata) AS list,
    json_each(CASE list.type WHEN 'array' THEN list.value ELSE '[]' END) AS one
WHERE one.type NOT IN ('array', 'object');
 END;
CREATE TRIGGER attributes_update AFTER UPDATE OF metadata ON documents BEGIN DELETE FROM attributes WHERE document = old.row; 
INSERT OR IGNORE INTO attributes
SELECT new.collection, one.key, replace(one.type, 'integer', 'real'), ifnull(one.atom, ''), new.row
FROM  json_each(new.metadata) AS one WHERE one.type NOT IN ('array', 'object')
UNION ALL
SELECT new.collection, list.key, replace(one.type, 'integer', 'real'), ifnull(one.atom, ''), new.row
FROM  json_each(new.metadata) AS list,
    json_each(CASE list.type WHEN 'array' THEN list.value ELSE '[]' END) AS one
WHERE one.type NOT IN ('array', 'object');
 END;
CREATE TRIGGER attributes_delete AFTER DELETE ON documents BEGIN DELETE FROM attributes WHERE document = old.row; END;
CREATE TABLE versions (document INTEGER PRIMARY KEY REFERENCES documents (row) ON DELETE CASCADE, number INTEGER NOT NULL, bytes INTEGER NOT NULL, pages TEXT NOT NULL);
CREATE TRIGGER versions_insert AFTER INSERT ON documents BEGIN INSERT INTO versions VALUES (new.row, 1, length(CAST(new.text AS BLOB)), '[]'); END;
CREATE TRIGGER versions_update AFTER UPDATE OF content_hash, text ON documents BEGIN UPDATE versions SET number = number + (new.content_hash != old.content_hash), bytes = length(CAST(new.text AS BLOB)), pages = '[]' WHERE document = new.row; END;

INSERT INTO facts VALUES ('embedder', '["words", 4]'), ('fingerprint', 'model');
INSERT INTO collections (name, generation) VALUES ('default', 1700000000000000000), ('other', 1700000000000000005);
INSERT INTO documents (row, collection, id, content_hash, reader, chunks, tokens, created, updated, title, metadata, text)
VALUES
    (1, 'default', 'a', 'hash a', 'model/64', 2, 4, 1700000000.5, 1700000001.5, 'Harbours',
     '{"kind": ["guide", "draft"], "year": 2024}', 'A red boat. The old harbour.'),
    (2, 'other', 'ü', 'hash ü', 'model/64', 1, 2, 1700000002.5, 1700000002.5, 'Ünder', '{}', 'Another boat.');
UPDATE documents SET content_hash = 'hash a, changed' WHERE row = 1;
INSERT INTO chunks (row, document, collection, ordinal, key, title, text, tokens) VALUES
    (3, 1, 'default', 0, 'key 3', 'Harbours', 'A red boat.', X'0100000002000000'),
    (4, 1, 'default', 1, 'key 4', 'Harbours', 'The old harbour.', X'0300000004000000'),
    (5, 2, 'other', 0, 'key 5', 'Ünder', 'Another boat.', X'0500000006000000'),
    (9, 2, 'other', 1, 'key 9', 'Ünder', 'Removed.', X'07000000');
DELETE FROM chunks WHERE row = 9;
INSERT INTO vectors VALUES
    (3, X'0000803F000000000000000000000000'),
    (4, X'000000000000803F0000000000000000'),
    (5, X'00000000000000000000803F00000000');
INSERT INTO spans VALUES (3, 0, 11, '', NULL), (4, 12, 28, '', 2), (5, 0, 13, '', NULL);
INSERT INTO turns (row, collection, conversation, method, reader, created, joined, question, answer, asked, written)
VALUES (6, 'default', 'talk', 'full', 'model', 1700000003.5, '[[3, "a#0"]]', 'Which boat?', 'The red one.',
    X'0A000000', X'0B0000000C000000');
INSERT INTO claims (row, renewed) VALUES (8, 4000000000.0);
INSERT INTO claimed VALUES ('key claimed', 8);
INSERT INTO jobs (row, id, collection, digest, status, stage, done, total, created, started, updated, finished) VALUES
    (1, 'job done', 'default', 'd1', 'completed', 'index', 2, 2, 1700000000, 1700000000, 1700000001, 1700000001),
    (2, 'job running', 'default', 'd2', 'running', 'encode', 1, 2, 1700000004, 1700000005, 1700000005, NULL),
    (3, 'job queued', 'other', 'd3', 'queued', '', 0, 0, 1700000006, NULL, 1700000006, NULL);
INSERT INTO job_documents (job, position, id, status, attempts, payload) VALUES
    (1, 0, 'a', 'completed', 1, NULL),
    (2, 0, 'b', 'running', 1, '["B", "Boats on a lake.", {}]'),
    (3, 0, 'c', 'queued', 0, '["C", "Clouds over the sea.", {}]');
INSERT INTO paces VALUES (2, 1.5, NULL);
INSERT INTO job_senders VALUES (2, 'someone');
