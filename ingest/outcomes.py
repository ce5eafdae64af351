"""What came of one document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class IngestOutcome:
    """The result of the ingest of one document.

    Attributes:
        document_id: Id of the document.
        collection: Its collection.
        status: Whether it is new, replaces an old version, or was there with the same content.
        chunks: Chunks of the version that is now in the catalogue.
        tokens: Tokens of these chunks.
    """

    document_id: str
    collection: str
    status: Literal["added", "replaced", "unchanged"]
    chunks: int
    tokens: int


@dataclass(frozen=True)
class ReindexOutcome:
    """The result of a reindex.

    Attributes:
        embedded: Chunks that got new vectors.
        reread: Documents that were split and encoded again for the present model.
    """

    embedded: int
    reread: int
