"""SearchScope: where to search."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.types import Filter


@dataclass(frozen=True)
class SearchScope:
    """Where to search.

    Attributes:
        collection: Collection to search.
        filter: Only documents whose metadata matches; None for all.
        documents: Only documents with these ids; None for all.
    """

    collection: str = "default"
    filter: Filter | None = None
    documents: tuple[str, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether all documents of the collection are searched."""
        return not self.filter and self.documents is None
