"""Arguments and results of the MCP tools, and the addresses of documents as resources.

`search` and `ask` take the fields of `POST /v1/search` and `POST /v1/answers`, and return the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal
from urllib.parse import quote, unquote

from pydantic import AfterValidator, BaseModel, Field, JsonValue

from ragkv.api.runtime.tenants import Tenant
from ragkv.api.schemas.common import DESCRIBED, MAX_DOCUMENTS, STRICT, Body, DocumentId, Filter, Name, check_storable
from ragkv.api.schemas.documents import Content
from ragkv.api.schemas.paging import write_place
from ragkv.catalog import CollectionInfo, DocumentInfo, DocumentOrder, SortField
from ragkv.client import Collection, RemoteDocument
from ragkv.ingest.wrapping import unwrapped_in_place
from ragkv.types import Document

DOCUMENT_URIS = "ragkv://documents/"
URI_TEMPLATE = DOCUMENT_URIS + "{collection}/{id}"
"""RFC 6570. A slash in an id is written as `%2F`."""
NOBODY = Tenant()
"""Sees collections under the names that they have."""
_COLLECTION = "Collection of the documents."


class NoArguments(Body):
    """A tool without arguments."""

    model_config = STRICT


class DocumentName(Body):
    """The name of one document."""

    model_config = STRICT

    id: Annotated[DocumentId, Field(description="Id of the document, as `list_documents` shows it.")]
    collection: Annotated[Name, Field(description="Collection of the document.")] = "default"

    @property
    def uri(self) -> str:
        """The address of the document as a resource."""
        return document_uri(self.collection, self.id)


class NamedContent(Content):
    """A document to ingest."""

    id: Annotated[DocumentId, Field(description="Id of the document. A document that has this id already is replaced.")]


class IngestArguments(Body):
    """Documents to ingest."""

    model_config = STRICT

    documents: Annotated[list[NamedContent], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    collection: Annotated[Name, Field(description=_COLLECTION)] = "default"

    def as_documents(self, collection: str) -> list[Document]:
        """Convert to documents, with wrapped prose in one line. collection: its name in the catalogue.

        The time grows with the texts, so that no event loop should wait for it.
        """
        return [
            Document(each.id, each.title or each.id, unwrapped_in_place(each.text), each.metadata, collection)
            for each in self.documents
        ]


class ListArguments(Body):
    """Which documents to list."""

    model_config = STRICT

    collection: Annotated[Name, Field(description=_COLLECTION)] = "default"
    limit: Annotated[int, Field(ge=1, le=100, description="Most documents of a page.")] = 20
    after: Annotated[str, Field(max_length=4096, description="The `after` of the previous page.")] = ""
    q: Annotated[
        str,
        Field(max_length=512, description="Only documents whose id or title contains each of these words."),
        AfterValidator(check_storable),
    ] = ""
    sort: Annotated[SortField, Field(description="What the documents are sorted by.")] = "id"
    order: Annotated[Literal["asc", "desc"], Field(description="Smallest first, or largest first.")] = "asc"
    filter: Filter | None = None

    @property
    def document_order(self) -> DocumentOrder:
        """The order, for the catalogue."""
        return DocumentOrder(self.sort, self.order == "desc", self.q)


class DocumentSummary(BaseModel):
    """A document that is ingested."""

    model_config = DESCRIBED

    uri: str
    """Address of its text as a resource."""
    id: str
    collection: str
    title: str
    metadata: dict[str, JsonValue]
    chunks: int
    tokens: int
    """Tokens of all its chunks."""
    bytes: int | None
    """Size of the text in UTF-8."""
    version: int
    """Counts the contents that the document has had, from 1."""
    updated: float
    """Unix seconds; when this version was stored."""

    @classmethod
    def of(cls, info: DocumentInfo | RemoteDocument, tenant: Tenant = NOBODY) -> DocumentSummary:
        """Convert a document of the catalogue or of a service, as the tenant knows it."""
        collection = tenant.outside(info.collection)
        return cls(
            uri=document_uri(collection, info.id),
            id=info.id,
            collection=collection,
            title=info.title,
            metadata=dict(info.metadata),
            chunks=info.chunks,
            tokens=info.tokens,
            bytes=info.bytes,
            version=info.version,
            updated=info.updated,
        )


class DocumentSummaries(BaseModel):
    """A page of documents, in the requested order."""

    model_config = DESCRIBED

    documents: list[DocumentSummary]
    after: str | None
    """Value of `after` for the next page; null on the last page."""

    @classmethod
    def of(cls, found: Sequence[DocumentInfo], arguments: ListArguments, tenant: Tenant = NOBODY) -> DocumentSummaries:
        """Build a page. There is a next one if more documents were found than the limit."""
        page, order = found[: arguments.limit], arguments.document_order
        after = write_place(order.place(page[-1]), order) if len(found) > arguments.limit else None
        return cls(documents=[DocumentSummary.of(info, tenant) for info in page], after=after)


class CollectionSummary(BaseModel):
    """A collection that has documents."""

    name: str
    documents: int
    chunks: int
    tokens: int


class CollectionSummaries(BaseModel):
    """The collections that have documents, by name."""

    collections: list[CollectionSummary]

    @classmethod
    def of(cls, found: Iterable[CollectionInfo | Collection], tenant: Tenant = NOBODY) -> CollectionSummaries:
        """Convert collections of the catalogue or of a service, as the tenant knows them."""
        return cls(
            collections=[
                CollectionSummary(
                    name=tenant.outside(each.name), documents=each.documents, chunks=each.chunks, tokens=each.tokens
                )
                for each in found
            ]
        )


class FailedDocument(BaseModel):
    """A document that was not ingested."""

    model_config = DESCRIBED

    id: str
    code: str
    """A stable word for programs."""
    message: str


class IngestSummary(BaseModel):
    """What became of the documents of an ingest."""

    model_config = DESCRIBED

    total: int
    completed: int
    """Documents that were ingested."""
    unchanged: int
    """Documents that were there with the same content."""
    failed: int
    cancelled: int
    """Documents that were deleted, or whose job was cancelled, before they were in."""
    failures: list[FailedDocument]
    """The first of those that failed, with the reason."""


class DeletedDocument(BaseModel):
    """The document that was deleted."""

    id: str
    collection: str


def document_uri(collection: str, document_id: str) -> str:
    """Return the address of a document as a resource."""
    return f"{DOCUMENT_URIS}{quote(collection, safe='')}/{quote(document_id, safe='')}"


def read_document_uri(uri: str) -> DocumentName | None:
    """Read what `document_uri` wrote; None if the address is no document's. A slash in the id may be a slash.

    Raises:
        ValidationError: The id or the collection is no name.
    """
    collection, slash, document_id = uri.removeprefix(DOCUMENT_URIS).partition("/")
    if not uri.startswith(DOCUMENT_URIS) or not slash:
        return None
    return DocumentName(id=unquote(document_id), collection=unquote(collection))
