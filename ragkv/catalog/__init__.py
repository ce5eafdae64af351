"""The catalogue: documents, chunks, vectors and jobs in one SQLite file. FTS5 and FAISS are views of it."""

from ragkv.catalog.catalog import Catalog
from ragkv.catalog.claims import GRACE_SECONDS
from ragkv.catalog.models import Changes, CollectionInfo, DocumentInfo, EmbedderIdentity, Passage, StoredTurn

__all__ = [
    "GRACE_SECONDS",
    "Catalog",
    "Changes",
    "CollectionInfo",
    "DocumentInfo",
    "EmbedderIdentity",
    "Passage",
    "StoredTurn",
]
