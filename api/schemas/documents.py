"""Bodies of the HTTP API about documents, jobs and collections, and the conversion to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.common import DESCRIBED, STRICT, Body, Metadata, Title, check_unicode
from ragkv.catalog import CollectionInfo, DocumentInfo
from ragkv.ingest.jobs import IngestJob
from ragkv.types import Chunk

if TYPE_CHECKING:
    from ragkv.api.runtime.kv_estimates import KVSizes  # imports torch, which `ragkv mcp --url` does without


class Content(Body):
    """The content of a document."""

    model_config = (
        STRICT
        | DESCRIBED
        | ConfigDict(
            json_schema_extra={
                "examples": [
                    {
                        "text": "Calloway Yard was founded by Edda Calloway.",
                        "title": "Calloway Yard",
                        "metadata": {"year": 1911},
                    }
                ]
            }
        )
    )

    text: Annotated[str, AfterValidator(check_unicode)]
    title: Title = ""
    """The id is used if the title is empty."""
    metadata: Metadata = Field(default_factory=dict)


class ListedDocument(BaseModel):
    """A document that is ingested."""

    model_config = DESCRIBED

    id: str
    collection: str
    title: str
    metadata: dict[str, JsonValue]
    chunks: int
    tokens: int
    """Tokens of all its chunks."""
    bytes: int
    """Size of the text in UTF-8."""
    kv_bytes: int
    """Bytes of its KV as the model computes it."""
    stored_bytes: int
    """Bytes that this KV takes in the store, in the store's form and without head records."""
    version: int
    """Counts the contents that the document has had, from 1."""
    hash: str
    """Hash of title, text and metadata. Each version has its own."""
    created: float
    """Unix seconds; when the first version was stored."""
    updated: float
    """Unix seconds; when this version was stored."""
    source: str | None = None
    """Path of the file that it came from, as its sender told it; null if that is not known."""
    file_bytes: int = 0
    """Size of the file that is kept, so that its pages can be shown; 0 if none is."""


class ShownDocument(ListedDocument):
    """A document and, if requested, its text."""

    text: str | None = None
    """Present if it was requested."""


class DocumentText(BaseModel):
    """The text of a document, or a part of it."""

    model_config = DESCRIBED

    id: str
    collection: str
    title: str
    version: int
    hash: str
    """Hash of the version that the text belongs to."""
    characters: int
    """Length of the whole text."""
    start: int
    """Offset of the first character that is returned."""
    end: int
    """Offset after the last one."""
    text: str


class ShownChunk(BaseModel):
    """A chunk of a document, and where it stands in the document's text."""

    model_config = DESCRIBED

    chunk_id: str
    chunk: int
    """Position in the document, from 0."""
    heading: str | None
    """The heading that the chunk stands under; null if there is none or the format has no headings."""
    page: int | None
    """Number, from 1, of the page on which the chunk begins; null for formats without pages."""
    start: int | None
    """Offset of its first character; null if the place is not known."""
    end: int | None
    """Offset after its last character."""
    tokens: int
    text: str


class ChunkPage(BaseModel):
    """Chunks of a document, in order."""

    model_config = DESCRIBED

    id: str
    collection: str
    title: str
    version: int
    hash: str
    """Hash of the version that the chunks belong to."""
    chunks: list[ShownChunk]
    after: int | None
    """Value of the parameter `after` for the next page; null on the last page."""


class DocumentPage(BaseModel):
    """Documents in the requested order."""

    model_config = DESCRIBED

    documents: list[ListedDocument]
    after: str | None
    """Value of the parameter `after` for the next page; null on the last page."""


class ShownCollection(BaseModel):
    """Size of a collection."""

    model_config = DESCRIBED

    name: str
    documents: int
    chunks: int
    tokens: int
    kv_bytes: int
    """Bytes of its KV as the model computes it, whether or not the KV is stored."""
    file_bytes: int
    """Size of the files that are kept, so that their pages can be shown."""


class Collections(BaseModel):
    """Collections that have documents, by name."""

    collections: list[ShownCollection]


class RecentJobs(BaseModel):
    """Jobs, newest first."""

    jobs: list[IngestJob]


UPLOAD_FORM: dict[str, Any] = {
    "schema": {
        "type": "object",
        "required": ["files"],
        "properties": {
            "files": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "contentMediaType": "application/octet-stream"},
                "description": "The files. The name of a file determines its format and becomes the document's id.",
            },
            "collection": {"type": "string", "default": "default"},
            "metadata": {"type": "object", "description": "JSON; added to every document of the files."},
            "sources": {
                "type": "string",
                "contentMediaType": "application/json",
                "description": "A JSON list; for each file what tells it from all others, such as its whole path; "
                "empty for none. A file whose name is the id of a document from another source gets a longer id.",
            },
        },
    },
    "example": {
        "files": ["notes.md"],
        "collection": "default",
        "metadata": {"kind": "notes"},
        "sources": '["/home/me/notes.md"]',
    },
}
"""The multipart form of `POST /v1/documents`, as OpenAPI."""


def to_listed_document(info: DocumentInfo, tenant: Tenant, sizes: KVSizes) -> dict[str, Any]:
    """Convert to ListedDocument.

    Args:
        info: The document in the catalogue.
        tenant: Sees the collection under its own name.
        sizes: Bytes of its KV.
    """
    return {
        "id": info.id,
        "collection": tenant.outside(info.collection),
        "title": info.title,
        "metadata": dict(info.metadata),
        "chunks": info.chunks,
        "tokens": info.tokens,
        "bytes": info.bytes,
        "kv_bytes": sizes.computed,
        "stored_bytes": sizes.stored,
        "version": info.version,
        "hash": info.content_hash,
        "created": info.created,
        "updated": info.updated,
        "source": info.source or None,
        "file_bytes": info.file_bytes,
    }


def to_document_text(info: DocumentInfo, tenant: Tenant, text: str, start: int, end: int | None) -> dict[str, Any]:
    """Convert to DocumentText: the characters from `start` to `end` (None: to the end) of a document's text."""
    low = min(start, len(text))
    high = len(text) if end is None else max(low, min(end, len(text)))
    return {**_identity(info, tenant), "characters": len(text), "start": low, "end": high, "text": text[low:high]}


def to_chunk_page(info: DocumentInfo, tenant: Tenant, chunks: Sequence[Chunk], limit: int) -> dict[str, Any]:
    """Convert to ChunkPage. There is a next page if there are more than `limit` chunks."""
    after = chunks[limit - 1].ordinal if len(chunks) > limit else None
    return {**_identity(info, tenant), "chunks": [to_shown_chunk(chunk) for chunk in chunks[:limit]], "after": after}


def to_shown_chunk(chunk: Chunk) -> dict[str, Any]:
    """Convert to ShownChunk."""
    span = chunk.span
    return {
        "chunk_id": chunk.id,
        "chunk": chunk.ordinal,
        "heading": (span and span.heading) or None,
        "page": span.page if span else None,
        "start": span.start if span else None,
        "end": span.end if span else None,
        "tokens": len(chunk.tokens),
        "text": chunk.text,
    }


def _identity(info: DocumentInfo, tenant: Tenant) -> dict[str, Any]:
    return {
        "id": info.id,
        "collection": tenant.outside(info.collection),
        "title": info.title,
        "version": info.version,
        "hash": info.content_hash,
    }


def to_shown_collection(info: CollectionInfo, tenant: Tenant, token_bytes: int) -> dict[str, Any]:
    """Convert to ShownCollection.

    Args:
        info: The collection in the catalogue.
        tenant: Sees the collection under its own name.
        token_bytes: Bytes of the KV of one token.
    """
    return {
        "name": tenant.outside(info.name),
        "documents": info.documents,
        "chunks": info.chunks,
        "tokens": info.tokens,
        "kv_bytes": info.tokens * token_bytes,
        "file_bytes": info.file_bytes,
    }
