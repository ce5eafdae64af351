"""Quota: how much KV a collection may hold. Counted from the catalogue, so it needs no look at the store."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.errors import QuotaExceeded
from ragkv.types import Document


@dataclass(frozen=True)
class Quota:
    """limit: bytes of KV of one collection, 0: any number · per_token: bytes of KV of one token, as the model computes
    it. Text that stands in two documents counts twice, whether or not it is stored once."""

    limit: int
    per_token: int

    def admit(self, document: Document, tokens: int, others: int) -> None:
        """Raises QuotaExceeded unless `tokens` of the document fit beside the collection's `others`."""
        used, needed = others * self.per_token, tokens * self.per_token
        if self.limit and used + needed > self.limit:
            raise QuotaExceeded(
                f"{document.id}: collection {document.collection!r} holds {used} bytes of KV without it, it needs "
                f"{needed}, the limit is {self.limit} (RAGKV_COLLECTION_BYTES); remove documents or raise the limit"
            )
