"""The request body of `POST /v1/search`. The response is `ragkv.passages.SearchResult`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from ragkv.api.schemas.common import STRICT, Body, DocumentId, Filter, Name, check_storable
from ragkv.retrieval import SearchScope

MAX_QUERY_CHARS = 8192
"""Longest query. The embedder reads some hundred words of it."""
MAX_NAMED = 1000
"""Most documents that a search may name."""


class SearchIn(Body):
    """A search for passages. A field that is left out takes the value from the settings of the service."""

    model_config = STRICT | ConfigDict(json_schema_extra={"examples": [{"query": "harbour of Tarn", "top_k": 3}]})

    query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARS), AfterValidator(check_storable)]
    collection: Name = "default"
    top_k: Annotated[int | None, Field(ge=1, le=64)] = None
    filter: Filter | None = None
    documents: Annotated[
        list[DocumentId] | None,
        Field(min_length=1, max_length=MAX_NAMED, description="Search only the documents with these ids."),
    ] = None

    def scope(self, collection: str) -> SearchScope:
        """Convert to SearchScope. collection: its name in the catalogue."""
        return SearchScope(collection, self.filter, None if self.documents is None else tuple(self.documents))
