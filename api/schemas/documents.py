"""Bodies of the HTTP API about documents, jobs and collections, and the conversion to them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from api.runtime.tenants import Tenant
from api.schemas.common import DESCRIBED, STRICT, Metadata, check_storable, check_unicode
from ingest.jobs import IngestJob
from ragkv.catalog import CollectionInfo, DocumentInfo


class Content(BaseModel):
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
    title: Annotated[str, Field(max_length=512), AfterValidator(check_storable)] = ""
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
    kv_bytes: int
    """Bytes of its KV as the model computes it."""
    hash: str
    """Hash of title, text and metadata. Each version has its own."""
    created: float
    """Unix seconds."""
    updated: float
    """Unix seconds."""


class ShownDocument(ListedDocument):
    """A document with its size and, if requested, its text."""

    bytes: int
    """Size of the text in UTF-8."""
    text: str | None = None
    """Present if it was requested."""


class DocumentPage(BaseModel):
    """Documents by id."""

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
        },
    },
    "example": {"files": ["notes.md"], "collection": "default", "metadata": {"kind": "notes"}},
}
"""The multipart form of `POST /v1/documents`, as OpenAPI."""


def to_listed_document(info: DocumentInfo, tenant: Tenant, token_bytes: int) -> dict[str, Any]:
    """Convert to ListedDocument.

    Args:
        info: The document in the catalogue.
        tenant: Sees the collection under its own name.
        token_bytes: Bytes of the KV of one token.
    """
    return {
        "id": info.id,
        "collection": tenant.outside(info.collection),
        "title": info.title,
        "metadata": dict(info.metadata),
        "chunks": info.chunks,
        "tokens": info.tokens,
        "kv_bytes": info.tokens * token_bytes,
        "hash": info.content_hash,
        "created": info.created,
        "updated": info.updated,
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
    }
