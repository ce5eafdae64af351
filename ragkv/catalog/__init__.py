"""The catalogue: documents, chunks, vectors, jobs and conversations, in one SQLite file or in PostgreSQL.

The database is the source of truth. The word index and the vector index are derived from it and can be rebuilt at any
time.
"""

from ragkv.catalog.catalog import Catalog
from ragkv.catalog.listener import ChangeListener
from ragkv.catalog.models import (
    ID_ORDER,
    Changes,
    CollectionInfo,
    DocumentInfo,
    DocumentOrder,
    DocumentVersion,
    EmbedderIdentity,
    Passage,
    PassageChanges,
    Reembedding,
    SortField,
    StoredTurn,
)

__all__ = [
    "ID_ORDER",
    "Catalog",
    "ChangeListener",
    "Changes",
    "CollectionInfo",
    "DocumentInfo",
    "DocumentOrder",
    "DocumentVersion",
    "EmbedderIdentity",
    "Passage",
    "PassageChanges",
    "Reembedding",
    "SortField",
    "StoredTurn",
]
