"""Quota: the limit on the KV of a collection. It is computed from the catalogue and does not query the store."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.errors import QuotaExceeded
from ragkv.types import Document


@dataclass(frozen=True)
class Quota:
    """A limit on the KV of each collection.

    Text that occurs in two documents counts twice, even if its KV is stored once.

    Attributes:
        limit: Largest KV of one collection, in bytes; 0 for no limit.
        per_token: KV of one token as the model computes it, in bytes.
    """

    limit: int
    per_token: int

    def admit(self, document: Document, tokens: int, others: int) -> None:
        """Check that a document fits into its collection.

        Args:
            document: The document to be added.
            tokens: Number of tokens of its chunks.
            others: Number of tokens of the other documents of the collection.

        Raises:
            QuotaExceeded: The document does not fit.
        """
        used, needed = others * self.per_token, tokens * self.per_token
        if self.limit and used + needed > self.limit:
            raise QuotaExceeded(
                f"{document.id}: collection {document.collection!r} holds {used} bytes of KV without it, it needs "
                f"{needed}, the limit is {self.limit} (RAGKV_COLLECTION_BYTES); remove documents or raise the limit"
            )
