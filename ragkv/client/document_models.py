"""Documents, chunks and collections as the client returns them."""

from __future__ import annotations

from typing import Any, TypedDict

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_IGNORE_EXTRA = ConfigDict(extra="ignore")


class Listing(TypedDict, total=False):
    """Which documents are listed, and in which order, as in `GET /v1/documents`.

    Attributes:
        sort: What they are sorted by: `id` (the default), `title`, `created`, `updated`, `bytes`, `tokens`, `chunks`.
        order: `asc` (the default) or `desc`.
        q: Only documents whose id or title contains each of these words, in any case.
    """

    sort: str
    order: str
    q: str


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class RemoteDocument:
    """A document of the service.

    Attributes:
        id: Id of the document, unique inside its collection.
        collection: Collection that the document belongs to.
        title: Title of the document.
        metadata: Metadata of the document.
        chunks: Number of chunks.
        tokens: Number of tokens of all chunks.
        kv_bytes: Size of its KV as the model computes it, in bytes.
        hash: Hash of title, text and metadata.
        created: When the first version was stored.
        updated: When this version was stored.
        bytes: Size of the text, in bytes; None in a list of a service before this field.
        text: Text of the document; None unless requested.
        version: Counts the contents that the document has had, from 1.
        stored_bytes: Size of its KV in the store, without head records.
        source: Path of the file that it came from, as its sender told it; None if that is not known.
        file_bytes: Size of the file that the service keeps, so that its pages can be shown; 0 if it keeps none.
    """

    id: str
    collection: str
    title: str
    metadata: dict[str, Any]
    chunks: int
    tokens: int
    kv_bytes: int
    hash: str
    created: float
    updated: float
    bytes: int | None = None
    text: str | None = None
    version: int = 1
    stored_bytes: int | None = None
    source: str | None = None
    file_bytes: int = 0


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class RemoteText:
    """The text of a document, or a part of it.

    Attributes:
        id: Id of the document.
        collection: Collection that the document belongs to.
        title: Title of the document.
        version: Number of the version that the text belongs to.
        hash: Hash of that version.
        characters: Length of the whole text.
        start: Offset of the first character of `text`.
        end: Offset after the last one.
        text: The text.
    """

    id: str
    collection: str
    title: str
    version: int
    hash: str
    characters: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class RemotePicture:
    """A page of a document as a picture.

    Attributes:
        png: The picture.
        marked: Whether the passage was found on the page and is marked.
        pages: How many pages the document has.
        mark: Left, top, right and bottom of the box around all that is marked, in pixels; None if nothing is, or an
            earlier service does not tell.
    """

    png: bytes
    marked: bool
    pages: int
    mark: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class RemoteChunk:
    """A chunk of a document.

    Attributes:
        chunk_id: Id of the chunk.
        chunk: Position in the document, from 0.
        heading: The heading that it stands under, or None.
        page: Number, from 1, of the page on which it begins; None for formats without pages.
        start: Offset of its first character in the document's text; None if that is not known.
        end: Offset after the last one.
        tokens: Number of its tokens.
        text: Text of the chunk.
    """

    chunk_id: str
    chunk: int
    heading: str | None
    page: int | None
    start: int | None
    end: int | None
    tokens: int
    text: str


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class RemoteChunks:
    """A page of the chunks of a document, in order.

    Attributes:
        id: Id of the document.
        collection: Collection that the document belongs to.
        title: Title of the document.
        version: Number of the version that the chunks belong to.
        hash: Hash of that version.
        chunks: Chunks of this page.
        after: Value of `after` for the next page; None on the last page.
    """

    id: str
    collection: str
    title: str
    version: int
    hash: str
    chunks: tuple[RemoteChunk, ...]
    after: int | None


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Page:
    """A page of documents, in the requested order.

    Attributes:
        documents: Documents of this page.
        after: Value of `after` for the next page; None on the last page.
    """

    documents: tuple[RemoteDocument, ...]
    after: str | None


@dataclass(frozen=True, config=_IGNORE_EXTRA)
class Collection:
    """Size of a collection.

    Attributes:
        name: Name of the collection.
        documents: Number of documents.
        chunks: Number of chunks.
        tokens: Number of tokens of all chunks.
        kv_bytes: Size of its KV as the model computes it, in bytes.
        file_bytes: Size of the files that the service keeps, so that their pages can be shown.
    """

    name: str
    documents: int
    chunks: int
    tokens: int
    kv_bytes: int
    file_bytes: int = 0
