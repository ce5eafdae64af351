"""Documents, jobs and collections as the edge sees them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from api.runtime.tenants import Tenant
from api.schemas.common import Edge, Metadata, _unicode, clean
from ingest.jobs import IngestJob
from ragkv.catalog import CollectionInfo, DocumentInfo


class Content(BaseModel):
    """What a document says. title: its id where there is none."""

    model_config = Edge | ConfigDict(
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

    text: Annotated[str, AfterValidator(_unicode)]
    title: Annotated[str, Field(max_length=512), AfterValidator(clean)] = ""
    metadata: Metadata = Field(default_factory=dict)


class ListedDocument(BaseModel):
    """A document that answers are given from. chunks, tokens: what it was read as · kv_bytes: of its KV, as the model
    computes it · hash: of title, text and metadata; another one for another version · times: Unix seconds."""

    id: str
    collection: str
    title: str
    metadata: dict[str, JsonValue]
    chunks: int
    tokens: int
    kv_bytes: int
    hash: str
    created: float
    updated: float


class ShownDocument(ListedDocument):
    """bytes: of its text, in UTF-8 · text: only where it was asked for."""

    bytes: int
    text: str | None = None


class DocumentPage(BaseModel):
    """Documents by id. after: what to ask with for the next ones; null where these are the last."""

    documents: list[ListedDocument]
    after: str | None


class ShownCollection(BaseModel):
    """How much a collection holds. kv_bytes: of its KV, as the model computes it, whatever is stored of that."""

    name: str
    documents: int
    chunks: int
    tokens: int
    kv_bytes: int


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
                "description": "The files. A file's name says its format and becomes the document's id.",
            },
            "collection": {"type": "string", "default": "default"},
            "metadata": {"type": "object", "description": "JSON; goes to every document of the files."},
        },
    },
    "example": {"files": ["notes.md"], "collection": "default", "metadata": {"kind": "notes"}},
}
"""The other body that `POST /v1/documents` takes, as OpenAPI."""


def listed(info: DocumentInfo, tenant: Tenant, token_bytes: int) -> dict[str, Any]:
    """A ListedDocument. token_bytes: of KV of one token."""
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


def summed(info: CollectionInfo, tenant: Tenant, token_bytes: int) -> dict[str, Any]:
    """A ShownCollection. token_bytes: of KV of one token."""
    return {
        "name": tenant.outside(info.name),
        "documents": info.documents,
        "chunks": info.chunks,
        "tokens": info.tokens,
        "kv_bytes": info.tokens * token_bytes,
    }
