"""Data classes of the catalogue, besides `Document` and `Chunk` of `ragkv.types`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import InputError
from ragkv.types import Chunk, Document, Key


@dataclass(frozen=True)
class EmbedderIdentity:
    """The embedding model that produced a set of vectors.

    Attributes:
        name: Name of the model.
        dimension: Length of its vectors.
        source: The setting that opens it, "" for the packaged English model. It does not tell embedders apart.
    """

    name: str
    dimension: int
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Reembedding:
    """How far the change to another embedder is.

    Attributes:
        earlier: The embedder of the collections that have not changed.
        following: The embedder that the change leads to.
        done: Chunks that have vectors of it.
        total: All chunks.
    """

    earlier: EmbedderIdentity
    following: EmbedderIdentity
    done: int
    total: int


@dataclass(frozen=True)
class DocumentVersion:
    """Everything that the catalogue stores for one version of a document.

    Attributes:
        document: The document as the user sent it.
        content_hash: Hash of title, text and metadata. It tells versions of a document apart.
        chunks: The chunks of the document, in order.
        vectors: Embeddings of the chunks, [len(chunks), embedder.dimension] float32.
        keys: KV store keys of the chunks, in the same order.
        embedder: The model that produced `vectors`.
        reader: Model fingerprint and chunk size that the document was split and encoded with.
        segments: Of the chunks' texts, one array [S, embedder.dimension] int8 each; none where
            they are made when a question asks for them.

    Raises:
        ValueError: `chunks`, `vectors` and `keys` differ in length, or the vectors have another dimension.
    """

    document: Document
    content_hash: str
    chunks: Sequence[Chunk]
    vectors: NDArray[np.float32]
    keys: Sequence[Key]
    embedder: EmbedderIdentity
    reader: str = ""
    segments: Sequence[NDArray[np.int8]] = ()

    def __post_init__(self) -> None:
        chunks, keys, shape = len(self.chunks), len(self.keys), self.vectors.shape
        if keys != chunks or shape != (chunks, self.embedder.dimension):
            raise ValueError(f"{chunks} chunks, {keys} keys, vectors {shape} do not belong together")

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True)
class DocumentInfo:
    """What the catalogue knows about a document, without its text.

    Attributes:
        collection: Collection that the document belongs to.
        id: Id of the document, unique inside its collection.
        title: Title of the document.
        metadata: Metadata of the document.
        content_hash: Hash of title, text and metadata.
        reader: Model fingerprint and chunk size that the document was split and encoded with.
        chunks: Number of chunks.
        tokens: Number of tokens of all chunks.
        created: When the first version was stored, in Unix seconds.
        updated: When this version was stored, in Unix seconds.
        version: Counts the contents that the document has had, from 1.
        bytes: Size of its text in UTF-8.
        source: Path of the file that it came from; "" if that is not known.
        file_bytes: Size of the file that is kept for its pages; 0 if none is.
    """

    collection: str
    id: str
    title: str
    metadata: Mapping[str, Any]
    content_hash: str
    reader: str
    chunks: int
    tokens: int
    created: float
    updated: float
    version: int
    bytes: int
    source: str = ""
    file_bytes: int = 0


SortField = Literal["id", "title", "created", "updated", "bytes", "tokens", "chunks"]
"""What documents can be sorted by. Documents that are equal in it are sorted by id."""


@dataclass(frozen=True)
class DocumentOrder:
    """Which documents are listed, and in which order.

    Attributes:
        sort: What they are sorted by.
        descending: Whether the largest comes first.
        words: Only documents whose id or title contains each of these words, in any case; "" for all.
        folder: Only documents whose id begins so; "" for all. The id of a file is its path.

    Raises:
        InputError: `sort` is no SortField.
    """

    sort: SortField = "id"
    descending: bool = False
    words: str = ""
    folder: str = ""

    def __post_init__(self) -> None:
        if self.sort not in get_args(SortField):
            raise InputError(
                f"documents cannot be sorted by {self.sort!r}; choose one of {', '.join(get_args(SortField))}"
            )

    def place(self, info: DocumentInfo) -> tuple[str | float, str]:
        """Return the place of a document in this order: its sort value, and its id."""
        return getattr(info, self.sort), info.id


ID_ORDER = DocumentOrder()


@dataclass(frozen=True)
class CollectionInfo:
    """Size of a collection.

    Attributes:
        name: Name of the collection.
        documents: Number of documents.
        chunks: Number of chunks.
        tokens: Number of tokens of all chunks.
        file_bytes: Size of the files that are kept for their pages.
    """

    name: str
    documents: int
    chunks: int
    tokens: int
    file_bytes: int = 0


@dataclass(frozen=True)
class Passage:
    """The part of a chunk that is embedded.

    Attributes:
        row: Row of the chunk in the catalogue. A row number is never reused.
        title: Title of the chunk.
        text: Text of the chunk.
    """

    row: int
    title: str
    text: str


@dataclass(frozen=True)
class StoredTurn:
    """A question of a conversation and its answer.

    Attributes:
        question: Text of the question.
        answer: Text of the answer.
        asked: Token ids of the question part of the prompt.
        written: Token ids of the answer and of the separator between it and the next turn.
        joined: (row, id) of each chunk that this turn added to the context, in prompt order.
        method: Method that the question was asked with.
        reader: Fingerprint of the model whose tokenizer produced these token ids.
        created: When the turn was stored, in Unix seconds.
        row: Row of the turn in the catalogue, 0 before it is stored. A row number is never reused.
        removed: Whether the answer was removed, because it may hold text of a document that was deleted or replaced.
    """

    question: str
    answer: str
    asked: tuple[int, ...]
    written: tuple[int, ...]
    joined: tuple[tuple[int, str], ...]
    method: str
    reader: str
    created: float = 0.0
    row: int = 0
    removed: bool = False


@dataclass(frozen=True)
class Changes:
    """The difference between a known set of chunk rows and the rows of a collection now.

    Attributes:
        generation: Generation of the collection that these changes lead to.
        removed: Known rows that are gone, ascending.
        added: New rows, ascending.
        vectors: Vectors of the added rows, [len(added), dimension].
        embedder: The model that produced the vectors of the collection; None while there are no chunks at all.
    """

    generation: int
    removed: NDArray[np.int64]
    added: NDArray[np.int64]
    vectors: NDArray[np.float32]
    embedder: EmbedderIdentity | None = None


@dataclass(frozen=True)
class PassageChanges:
    """What brings a word index of a collection up to date.

    Attributes:
        generation: Generation that the index has when it has applied these changes; the one it had, if they are not
            complete.
        removed: Known rows that are gone, ascending.
        added: New chunks with their titles and texts, ordered by row.
        complete: Whether this is all. Otherwise apply it and ask again.
    """

    generation: int
    removed: NDArray[np.int64]
    added: tuple[Passage, ...]
    complete: bool
