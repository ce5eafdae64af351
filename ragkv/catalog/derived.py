"""Tables that SQLite derives from the documents by triggers, so that they are right whichever release writes.

    attributes   the metadata, one row for each scalar value, for filters (attributes.py)
    versions     see versions.py; only the pages are written by the ingest itself

They can be rebuilt. PostgreSQL has no such triggers: attributes.py and versions.py write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.catalog.transaction import Transaction


@dataclass(frozen=True)
class DerivedTable:
    """A table with triggers that keep it up to date.

    Attributes:
        name: Its name; those of its triggers and indexes begin with it.
        tables: What creates it, with its indexes.
        triggers: What creates its triggers, by event.
        fill: What fills it from the documents.
        disposable: Whether it is dropped before it is rebuilt; otherwise what is there is kept.
    """

    name: str
    tables: Sequence[str]
    triggers: dict[str, str]
    fill: str
    disposable: bool

    def is_intact(self, transaction: Transaction) -> bool:
        """Return whether the table and its triggers exist."""
        sql = "SELECT count(*) FROM sqlite_master WHERE name = ? OR name GLOB ?"
        count: int = transaction.exec_driver_sql(sql, (self.name, f"{self.name}_*")).fetchone()[0]
        return count == len(self.tables) + len(self.triggers)

    def rebuild(self, transaction: Transaction) -> None:
        """Rebuild the table from the documents. Needs a write transaction."""
        for event in self.triggers:
            transaction.exec_driver_sql(f"DROP TRIGGER IF EXISTS {self.name}_{event}")
        if self.disposable:
            transaction.exec_driver_sql(f"DROP TABLE IF EXISTS {self.name}")
        for statement in (*self.tables, *self.triggers.values(), self.fill):
            transaction.exec_driver_sql(statement)


# type: the type name of json_each; 'real' for every number, because 1 and 1.0 are equal. value: '' for null.
TYPE, VALUE = "replace({it}.type, 'integer', 'real')", "ifnull({it}.atom, '')"
_WRITE = f"""
INSERT OR IGNORE INTO attributes
SELECT {{of}}.collection, one.key, {TYPE.format(it="one")}, {VALUE.format(it="one")}, {{of}}.row
FROM {{documents}} json_each({{of}}.metadata) AS one WHERE one.type NOT IN ('array', 'object')
UNION ALL
SELECT {{of}}.collection, list.key, {TYPE.format(it="one")}, {VALUE.format(it="one")}, {{of}}.row
FROM {{documents}} json_each({{of}}.metadata) AS list,
    json_each(CASE list.type WHEN 'array' THEN list.value ELSE '[]' END) AS one
WHERE one.type NOT IN ('array', 'object');
"""
_WRITE_NEW = _WRITE.format(of="new", documents="")
attributes = DerivedTable(
    "attributes",
    (
        "CREATE TABLE attributes (collection TEXT, key TEXT, type TEXT, value, document INTEGER,"
        " PRIMARY KEY (collection, key, type, value, document)) WITHOUT ROWID",
        "CREATE INDEX attributes_by_document ON attributes (document)",
    ),
    {
        "insert": f"CREATE TRIGGER attributes_insert AFTER INSERT ON documents BEGIN {_WRITE_NEW} END",
        "update": "CREATE TRIGGER attributes_update AFTER UPDATE OF metadata ON documents BEGIN"
        f" DELETE FROM attributes WHERE document = old.row; {_WRITE_NEW} END",
        "delete": "CREATE TRIGGER attributes_delete AFTER DELETE ON documents BEGIN"
        " DELETE FROM attributes WHERE document = old.row; END",
    },
    _WRITE.format(of="documents", documents="documents,"),
    disposable=True,
)

# Documents of a release without this table become version 1; others keep their number.
versions = DerivedTable(
    "versions",
    (
        "CREATE TABLE IF NOT EXISTS versions (document INTEGER PRIMARY KEY REFERENCES documents (row)"
        " ON DELETE CASCADE, number INTEGER NOT NULL, bytes INTEGER NOT NULL, pages TEXT NOT NULL)",
    ),
    {
        "insert": "CREATE TRIGGER versions_insert AFTER INSERT ON documents BEGIN"
        " INSERT INTO versions VALUES (new.row, 1, length(CAST(new.text AS BLOB)), '[]'); END",
        "update": "CREATE TRIGGER versions_update AFTER UPDATE OF content_hash, text ON documents BEGIN"
        " UPDATE versions SET number = number + (new.content_hash != old.content_hash),"
        " bytes = length(CAST(new.text AS BLOB)), pages = '[]' WHERE document = new.row; END",
    },
    "INSERT OR IGNORE INTO versions SELECT row, 1, length(CAST(text AS BLOB)), '[]' FROM documents",
    disposable=False,
)
