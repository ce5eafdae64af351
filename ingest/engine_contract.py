"""What ingestion needs of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ragkv.admin.quota import Quota
from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.ingest.chunker import PromptPiece
from ragkv.types import Chunk, EmbeddedPassages, Key


class IngestPrompt(PromptPiece, Protocol):
    """The part of ragkv.model.prompt.Prompt that ingest needs."""

    def of(self, collection: str) -> IngestPrompt:
        """Return the pieces with the wrapper tokens of a collection."""
        ...

    def reader(self, fingerprint: str) -> str:
        """Name the model and the wrapper tokens that read documents."""
        ...


class IngestModel(Protocol):
    """The part of the model that ingest needs."""

    @property
    def prompt(self) -> IngestPrompt: ...


class IngestEmbedder(Protocol):
    """The part of ragkv.retrieval.Embedder that ingest needs."""

    @property
    def identity(self) -> EmbedderIdentity: ...

    def encode_passages(self, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages: ...


class IngestViews(Protocol):
    """The part of ragkv.retrieval.views.Views that ingest needs."""

    def refresh(self, collection: str) -> None: ...

    def changed(self, collection: str) -> None: ...

    def save(self) -> None: ...


class IngestRetriever(Protocol):
    """The part of ragkv.retrieval.Retriever that ingest needs."""

    @property
    def embedder(self) -> IngestEmbedder: ...

    @property
    def views(self) -> IngestViews: ...


class IngestEngine(Protocol):
    """The part of ragkv.engine.engine.Engine that ingest needs."""

    @property
    def model(self) -> IngestModel: ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def retriever(self) -> IngestRetriever: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def group_tokens(self) -> int: ...

    @property
    def split_seconds(self) -> float:
        """Seconds of processor time that splitting a MiB of text may take."""
        ...

    @property
    def quota(self) -> Quota: ...

    def key(self, chunk: Chunk, collection: str) -> Key:
        """Return the key of a chunk's KV."""
        ...

    def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
        """Encode chunks, each with its collection, and begin to store their KV, unless it is stored already."""
        ...

    def is_writing(self, keys: Iterable[Key]) -> bool:
        """Whether the KV of one of these chunks is still being written."""
        ...

    def finish_writes(self, keys: Iterable[Key]) -> None:
        """Wait until the KV of these chunks is written."""
        ...

    def evict(self, keys: Iterable[Key], claim: int | None = None) -> None:
        """Delete KV that no chunk refers to and that no claim other than `claim` holds."""
        ...
