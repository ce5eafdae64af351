"""Quota: the limit on the KV and files of a collection. It is computed from the catalogue and asks no store."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.errors import QuotaExceeded
from ragkv.types import Document


@dataclass(frozen=True)
class Quota:
    """A limit on the KV and the kept files of each collection.

    Text that occurs in two documents counts twice, even if its KV is stored once.

    Attributes:
        limit: Most bytes of one collection; 0 for no limit.
        per_token: KV of one token as the model computes it, in bytes.
    """

    limit: int
    per_token: int

    def admit(self, document: Document, tokens: int, others: int, files: int) -> None:
        """Check that a document fits into its collection.

        Args:
            document: The document to be added.
            tokens: Number of tokens of its chunks.
            others: Number of tokens of the other documents of the collection.
            files: Bytes of the files that are kept of them.

        Raises:
            QuotaExceeded: The document does not fit.
        """
        kept = len(document.file)
        used, needed = others * self.per_token + files, tokens * self.per_token + kept
        if self.limit and used + needed > self.limit:
            raise QuotaExceeded(
                f"{document.id}: collection {document.collection!r} holds {used} bytes of KV and files without "
                f"it, it needs {needed}{f', with its file of {kept},' if kept else ''} and the limit is {self.limit} "
                f"(RAGKV_COLLECTION_BYTES); remove documents or raise the limit"
            )
